"""Reducer: ranks that arrive late or never, and the reducer after that."""

import gc
import itertools
import re
import time
import weakref
from types import SimpleNamespace

import pytest

from hpcaccum import (
    BrokenObjectError,
    Layout,
    Reducer,
    WaitTimeoutError,
    deadline,
    group_of,
)
from hpcaccum.reducer import schedule
from hpcaccum.spans import Recorder, recorded_by

from .expiring import missed_by
from .reducing import EACH, NODES, ONES, SHAPES, Maker
from .support import for_some_pause
from .training import meet, raised

pytestmark = pytest.mark.any_size


def copying(reducer):
    return reducer.reduce(ONES)


def in_place(reducer):
    return reducer.reduce()


def starting(reducer):
    for name in ONES:
        reducer.start(name)
    return reducer.wait()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("maker", ["flat", "hierarchical"], indirect=True)
@pytest.mark.parametrize("call", [copying, in_place, starting])
def test_naps_are_short_where_tests_of_requests_move_data(
    maker, rank, call, monkeypatch
):
    """With naps that grow, MPICH took 5 s for 128 MiB between nodes, not 0.2 s."""
    # No time is spent before the first nap.
    for looks in "_LOOKS", "_CROWDED_LOOKS":
        monkeypatch.setattr(schedule, looks, 1)
    monkeypatch.setattr(deadline, "EAGER", 0)
    reducer = maker(SHAPES)
    call(reducer)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=nap)
    meet()
    with monkeypatch.context() as patch:
        patch.setattr(deadline, "time", clock)
        if rank == 0:
            # Naps that grow are too long after 1 ms. Those that are short keep a core
            # busy.
            time.sleep(0.1)
        call(reducer)

    assert rank == 0 or 0 < max(naps) <= 50e-6


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("maker", "call", "which"),
    [
        ("one-shot", copying, "first"),
        ("shared", in_place, "last"),
        ("staged", starting, "first"),
        ("flat", copying, "last"),
        ("flat", starting, "first"),
        ("hierarchical", in_place, "first"),
        ("hierarchical", starting, "last"),
    ],
    indirect=["maker"],
)
def test_a_rank_that_does_not_arrive_is_named(comm, maker, rank, size, which, call):
    late = 0 if which == "first" else size - 1
    reducer = maker(SHAPES)
    call(reducer)
    error = missed_by(late, comm, call, reducer)

    if rank != late:
        again, started = raised(call, reducer), raised(reducer.start, "x")
        assert type(error) is WaitTimeoutError
        assert type(again) is type(started) is BrokenObjectError
        wanted = (
            rf"reduction 2: waited \S+ s for rank {late} of {size} to make the same"
        )
        assert re.search(wanted, str(error))
        assert "reduction 2 was ended by an exception" in str(again)


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("kind", ["hierarchical", "flat"])
def test_inputs_of_a_call_that_was_given_up_are_not_in_later_sums(
    comm, rank, size, kind
):
    for late in (0, size - 1):
        given_up = Maker(comm, kind)
        reducer = given_up(SHAPES)
        error = missed_by(late, comm, copying, reducer)
        given_up.free()
        assert rank == late or type(error) is WaitTimeoutError
    # MPI may give the identity of a communicator that was freed to another one.
    for nodes in NODES:
        maker = Maker(comm, kind, nodes)
        reducer = maker(SHAPES)
        for value in range(2, 6):
            mine = {name: value * array for name, array in ONES.items()}
            assert (reducer.reduce(mine)["x"] == value).all()
        maker.free()


@EACH
@pytest.mark.ranks(min=2)
def test_every_wait_is_in_a_trace_with_its_call(maker, rank):
    reducer, calls = maker(SHAPES), itertools.count(1)

    def waits_for_rank_0(seconds):
        recorder, call = Recorder(), f"reducer: reduction {next(calls)}"
        meet()
        with recorded_by(recorder):
            time.sleep(seconds * (rank == 0))
            reducer.reduce(ONES)
        waits = [e for e in recorder.rows()[""] if e.label.name == "wait"]
        waited = sum(e.end - e.begin for e in waits if e.args["call"] == call)
        return rank == 0 or seconds / 2 < waited <= reducer.waited

    assert for_some_pause(waits_for_rank_0)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["flat", "shared"])
def test_what_mpi_uses_outlives_a_call_that_was_given_up(comm, schedule):
    group = group_of(comm)
    if schedule == "shared" and not group.single_node:
        pytest.skip("the ranks are on several nodes")
    reducer = Reducer(Layout(SHAPES, "float32"), comm, schedule=schedule)
    made = weakref.ref(reducer._schedule)
    error = missed_by(0, comm, reducer.reduce, ONES)
    reducer.free()
    del reducer, error
    gc.collect()

    # Of shared memory, MPI knows nothing.
    assert (made() is not None) == (schedule == "flat")

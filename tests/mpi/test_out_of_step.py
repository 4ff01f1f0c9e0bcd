"""Ranks that make different collective calls hear of it at once, and of both calls."""

from __future__ import annotations

import threading

import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, Group

from .reducing import (
    ALL,
    ONES,
    SHAPES,
    limit_fixture,  # noqa: F401
    maker_fixture,  # noqa: F401
    works,
)
from .training import meet, raised

pytestmark = pytest.mark.ranks(min=2)


def copying(reducer):
    return reducer.reduce(ONES)


def starting(reducer):
    for name in ONES:
        reducer.start(name)
    return reducer.wait()


def checked(error, *calls):
    """Check that an error names calls."""
    assert type(error) is DisagreementError, repr(error)
    assert str(error).startswith("ranks make different calls: ")
    for call in calls:
        assert call in str(error)


@ALL
@pytest.mark.parametrize("call", [copying, starting])
@pytest.mark.parametrize("which", ["first", "last"])
def test_rank_that_frees_while_others_reduce(maker, rank, size, call, which):
    odd = 0 if which == "first" else size - 1
    reducer = maker(SHAPES, name="grads")
    call(reducer)
    error = raised(reducer.free) if rank == odd else raised(call, reducer)
    meet()

    checked(error, f"rank {odd} in 'grads (number ", ": free'", "'grads: reduction 2'")


@ALL
def test_ranks_that_take_two_reducers_in_different_order(maker, rank, size):
    reducers = [maker(SHAPES, name="one"), maker(SHAPES, name="two")]
    error = raised(copying, reducers[rank == 0])
    meet()

    checked(error, "rank 0 in 'two: reduction 1'", "in 'one: reduction 1'")


def test_ranks_that_free_in_different_order(comm, rank, size):
    accs = [hpc.ConditionalAccumulator("float32", (2,), comm=comm) for _ in range(2)]
    error = raised(accs[rank == 0].free)

    checked(error, "conditional_accumulator (number 1): free", "(number 2): free")
    # Nothing was freed, and all are in step.
    for acc in accs:
        assert acc.num_accumulated() == 0
        acc.free()
        assert raised(acc.num_accumulated).args == (
            "accumulator 'conditional_accumulator' was freed",
        )


def test_rank_that_frees_while_others_construct(comm, rank, size):
    acc = hpc.ConditionalAccumulator("float32", (2,), comm=comm, name="grads")
    error = (
        raised(acc.free)
        if rank == size - 1
        else raised(hpc.ConditionalAccumulator, "float32", (3,), comm=comm)
    )

    checked(error, f"rank {size - 1} in 'grads (number 1): free'", "Accumulator")
    acc.free()


def test_rank_that_initializes_while_others_construct(comm, rank, size):
    opt = hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm)
    error = (
        raised(opt.initialize, [hpc.Variable([1.0], "w")])
        if rank == 0
        else raised(hpc.ConditionalAccumulator, "float32", (3,), comm=comm)
    )

    checked(error, "rank 0 in 'CrossShardOptimizer: initialize'", "Accumulator")
    opt.free()


@ALL
def test_reducers_in_two_threads_are_not_taken_for_a_mistake(maker, rank, size):
    one, two = maker(SHAPES, name="one"), maker(SHAPES, name="two")
    errors = []

    def other():
        errors.append(raised(copying, one))

    thread = threading.Thread(target=other)
    thread.start()
    errors.append(raised(copying, two))
    thread.join()
    meet()

    assert not any(isinstance(error, Exception) for error in errors), errors


@ALL
def test_rank_that_is_only_late_is_no_mistake(maker, rank, size, monkeypatch):
    reducer = maker(SHAPES)
    group = Group.of(maker.group)
    # Every wait is reported at once.
    monkeypatch.setattr("hpcaccum.meeting._PATIENCE", 0.0)
    for late in range(size):
        for turn in range(3):
            if rank == late:
                meet_late(0.01)
            works(reducer, size)
            assert group.meet(rank, f"turn {turn}") == list(range(size))


def meet_late(seconds):
    threading.Event().wait(seconds)

"""Ranks that make different collective calls get an error that names both calls."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, group_of
from tests import internals

from ..common import check_error
from .expiring import times_out_without
from .reducing import EACH, SHAPES, works
from .support import WAIT
from .test_reducer_waiting import copying, starting
from .training import meet, raised

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.own_comm, pytest.mark.any_size]
pytestmark += [pytest.mark.usefixtures("impatient")]


@pytest.fixture
def at_once():
    """Let ranks report every wait."""
    with internals.limits(patience=0.0):
        yield


def checked(error, *calls):
    check_error(error, "ranks make different calls: ", *calls, kind=DisagreementError)


@pytest.mark.parametrize(
    ("maker", "call", "which"),
    [
        ("one-shot", copying, "first"),
        ("shared", starting, "last"),
        ("staged", copying, "last"),
        ("flat", starting, "first"),
        ("hierarchical", copying, "first"),
    ],
    indirect=["maker"],
)
def test_rank_that_frees_while_others_reduce(maker, rank, size, call, which):
    odd = 0 if which == "first" else size - 1
    reducer = maker(SHAPES, name="grads")
    call(reducer)
    error = raised(reducer.free) if rank == odd else raised(call, reducer)
    meet()

    checked(error, f"rank {odd} in 'grads (number ", ": free'", "): reduction 2'")


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


@EACH
def test_threads_may_reduce_and_exchange_in_different_order(maker, rank, at_once):
    reducer, results = maker(SHAPES), []
    acts = [lambda: copying(reducer), lambda: maker.group.allgather(rank, "lunch")]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        for pause in (0.0, 0.05):
            for number in [0, 1] if rank else [1, 0]:
                results.append((one, two)[number].submit(acts[number]))
                # Rank 0 is in one of them, the others are in the other one.
                time.sleep(pause)
            meet([result.exception() for result in results])
    assert not any(result.exception() for result in results)


@EACH
def test_rank_that_gave_up_a_reduction_waits_in_no_call(comm, maker, rank, size):
    reducer, group = maker(SHAPES), maker.group
    with times_out_without(comm, 0):
        if rank > 0:
            assert type(raised(copying, reducer)) is hpc.WaitTimeoutError
    meet()
    if rank > 0:
        time.sleep(0.05)
    assert group.allgather(rank, "lunch") == list(range(size))


@EACH
def test_call_of_an_exchange_that_failed_is_forgotten(maker, rank, size, monkeypatch):
    reducer, group = maker(SHAPES), maker.group
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.05")
    if rank == 0:
        assert type(raised(group.allgather, rank, "lunch")) is hpc.WaitTimeoutError
    meet()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    if rank > 0:
        assert type(raised(group.allgather, rank, "lunch")) is hpc.WaitTimeoutError
        time.sleep(0.05)
    works(reducer, size)


@EACH
def test_rank_that_is_only_late_is_no_error(maker, rank, size, at_once):
    reducer = maker(SHAPES)
    group = group_of(maker.group)
    for odd in range(size):
        for turn in range(3):
            if rank == odd:
                time.sleep(0.01)
            works(reducer, size)
            assert group.allgather(rank, f"turn {turn}") == list(range(size))

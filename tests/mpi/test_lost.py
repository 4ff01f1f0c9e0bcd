"""A rank is lost if an exception ends its call: the others go on without it.

Takes and updates leave out what it was admitted with and has not written, and nothing
else. Gradients are small integers, so sums are exact.
"""

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from .acting import WAIT, Take, at, meet, same_bits, until

pytestmark = pytest.mark.ranks(min=2)

KINDS = {
    "slots": {"shape": (2,)},
    "any shape": {"shape": None, "capacity": 2},
    "sum": {"shape": (2,), "storage": "sum"},
}


@pytest.fixture(autouse=True)
def apart():
    """No gradient is sent with the request to admit it: its rank writes it later."""
    with internals.limits(short=0):
        yield


@pytest.fixture
def make(make_one):
    """Accumulators for one test: a lost rank does not come back."""
    yield lambda **options: make_one(
        hpc.ConditionalAccumulator, "float64", **KINDS["slots"] | options
    )
    meet()


@pytest.mark.parametrize("admitted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_apply_that_breaks_is_left_out(make, size, kind, admitted):
    acc = make(reduction_type="SUM", **KINDS[kind])
    at(-1, lose if admitted else break_before_admission, acc)
    for rank in range(size - 1):
        assert at(rank, acc.apply_grad, [1, 1], 0)
    if admitted and kind == "sum":
        # Part of the gradient is in the sum of all, which is discarded.
        with pytest.raises(hpc.WaitTimeoutError):
            at(0, acc.take_grad, size - 1, timeout=0)
        for rank in range(size - 1):
            assert at(rank, acc.apply_grad, [1, 1], 0)
    same_bits(at(0, acc.take_grad, size - 1, timeout=WAIT), [size - 1.0] * 2)
    assert at(0, acc.statistics).lost == (size - 1,)
    with pytest.raises(hpc.BrokenObjectError, match="an exception ended a call"):
        at(-1, acc.apply_grad, [1, 1], 1)


def lose(acc):
    """Lose this rank, whose gradient is admitted and cannot be written."""
    with internals.before_records(acc, fail), pytest.raises(MemoryError):
        acc.apply_grad([7, 1], 0)


def fail():
    raise MemoryError


def test_the_first_exception_is_the_cause(make):
    acc = make()
    at(-1, lose, acc)

    def cause():
        with pytest.raises(hpc.BrokenObjectError) as caught:
            acc.apply_grad([7, 1], 0)
        return type(caught.value.__cause__)

    assert at(-1, cause) is at(-1, cause) is MemoryError
    # What needs no gradient is possible.
    assert at(-1, lambda: acc.global_step) == 0


@pytest.mark.parametrize("before", [0, 2])
def test_a_round_goes_on_without_a_gradient(make, size, before):
    acc = make()
    for _ in range(before):
        at(-1, acc.apply_grad, [4, 1], 0)
    at(0, acc.apply_grad, [4, 1], 0)
    at(-1, lose, acc)
    # The sum to which it was adding is left out; the divisor is that of the others.
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [4.0, 1.0])
    found, lost = at(0, acc.statistics), (size - 1,)
    assert (found.lost, found.left, found.num_lost) == (lost, lost, 1 + before)


def test_a_take_that_waits_for_all_ranks_needs_one_less(make, size):
    acc = make()
    take = Take(acc, 0, size)
    for rank in range(size - 1):
        at(rank, acc.apply_grad, [4, 1], 0)
    assert not take.over()
    at(-1, break_before_admission, acc)
    same_bits(take.result(), [4.0, 1.0])
    assert at(0, lambda: acc.global_step) == 1
    assert at(0, acc.statistics).num_lost == 0


def break_before_admission(acc):
    with internals.fail("admit", acc, MemoryError), pytest.raises(MemoryError):
        acc.apply_grad([7, 1], 0)


def test_a_gradient_that_closed_the_round_is_left_out(make, size):
    acc = make()
    at(0, acc.apply_grad, [3, 1], 0)
    take = Take(acc, 0, 2)
    at(-1, lose, acc)

    same_bits(take.result(), [3.0, 1.0])
    assert at(0, lambda: acc.global_step) == 1


def test_a_round_of_which_all_is_lost_is_not_taken(make):
    acc = make()
    take = Take(acc, 0, 1)
    at(-1, lose, acc)
    at(0, until, lambda: internals.take_waits(acc))
    assert not take.over()
    # A rank that waits for the next step would never return.
    assert at(0, lambda: acc.global_step) == 0

    assert at(0, acc.apply_grad, [5, 1], 0)
    same_bits(take.result(), [5.0, 1.0])
    assert at(0, lambda: acc.global_step) == 1


def test_rows_of_a_lost_rank_are_left_out(comm, size):
    with hpc.SparseConditionalAccumulator("f8", (9, 1), capacity=4, comm=comm) as acc:
        at(0, acc.apply_grad, [2], np.ones((1, 1)))
        with internals.before_records(acc, fail), pytest.raises(MemoryError):
            at(-1, acc.apply_grad, [3], np.ones((1, 1)))
        found = at(0, acc.take_grad, 1, timeout=WAIT)
        assert (found.indices.tolist(), found.values.tolist()) == ([2], [[1.0]])
        assert at(0, acc.statistics).num_lost == 1


def test_a_signal_handler_cannot_make_a_call_during_another_one(make):
    acc, match = make(), "in a signal handler that interrupted another call"

    def again():
        with pytest.raises(hpc.InvalidArgumentError, match=match):
            acc.apply_grad([3, 1], 0)

    with internals.before_records(acc, again):
        assert at(-1, acc.apply_grad, [7, 1], 0)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [7.0, 1.0])


def test_updates_go_on_without_a_lost_rank(comm):
    variable = hpc.Variable(np.zeros(3), "w")
    with hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 99, comm=comm) as opt:
        opt.initialize([variable])
        with internals.fail("put", opt, MemoryError), pytest.raises(MemoryError):
            # The host itself: an agent puts those of other nodes in their places.
            at(0, opt.apply_gradients, [(np.full(3, 7.0), variable)])
        for _ in range(3):
            receipt = at(-1, opt.apply_gradients, [(np.ones(3), variable)])
            assert receipt
        # The lost one is a step without an update.
        assert receipt.global_step == 3
        assert at(-1, lambda: variable.value.tolist()) == [-3.0] * 3
        with pytest.raises(hpc.BrokenObjectError):
            at(0, opt.apply_gradients, [(np.ones(3), variable)])


def test_synchronous_updates_go_on_without_a_lost_rank(comm, rank, size):
    variable = hpc.Variable(np.zeros(3), "w")
    with hpc.SyncReplicasOptimizer(hpc.SGD(1.0), size, comm=comm) as opt:
        opt.initialize([variable])
        lost = rank == size - 1
        if lost:
            failing = internals.fail("admit", opt, MemoryError)
            with failing, pytest.raises(MemoryError):
                opt.apply_gradients([(np.full(3, 7.0), variable)])
        else:
            for _ in range(3):
                opt.apply_gradients([(np.ones(3), variable)])
            assert variable.value.tolist() == [-3.0] * 3

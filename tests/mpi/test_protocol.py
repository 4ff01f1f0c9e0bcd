"""The admission protocol: writers that do not finish, takes that fail."""

import pytest

import hpcaccum as hpc
from tests import internals

from .acting import VAIN, WAIT, Admitted, Take, at, close_unreduced, same_bits


@pytest.mark.ranks(min=2)
def test_round_that_was_closed_is_finished_by_a_later_take(acc):
    at(0, acc.apply_grad, [1, 0])
    late = Admitted(acc, 1)
    assert at(0, acc.num_accumulated) == 2

    expected = r"waited \S+ s for rank 1, admitted to the round, to finish writing"
    for taker in (0, 1, 0):
        with pytest.raises(hpc.WaitTimeoutError, match=expected):
            at(taker, acc.take_grad, 1, timeout=VAIN)
        assert at(1, lambda: acc.global_step) == 1
    # Other ranks continue in the next round.
    assert not at(0, acc.apply_grad, [8, 8], 0)
    at(0, acc.apply_grad, [5, 6], 1)
    assert at(1, acc.num_accumulated) == 3

    late.write([3, 0])
    same_bits(at(1, acc.take_grad, 9, timeout=WAIT), [2.0, 0.0])
    assert at(0, lambda: acc.global_step) == 1
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [5.0, 6.0])


@pytest.mark.ranks(min=2)
def test_writer_does_not_wait_for_another(acc):
    late = Admitted(acc, 1)

    for _ in range(3):
        assert at(0, acc.apply_grad, [1, 1])
    late.write([5, 1])
    same_bits(at(0, acc.take_grad, 4, timeout=WAIT), [2.0, 1.0])


def test_reduction_that_fails_leaves_the_round_to_the_next_take(acc):
    at(0, acc.apply_grad, [1, 2])
    at(1, acc.apply_grad, [3, 4])

    at(1, close_unreduced, acc)
    at(0, acc.apply_grad, [9, 9], 1)
    same_bits(at(2, acc.take_grad, 1, timeout=WAIT), [2.0, 3.0])
    same_bits(at(1, acc.take_grad, 1, timeout=WAIT), [9.0, 9.0])


@pytest.fixture
def full(make):
    """An accumulator whose rounds hold 3 gradients."""
    acc = make()
    with internals.limit_rounds(acc, 3):
        yield acc


def test_full_round_takes_no_more(full):
    acc = full
    for step in range(3):
        for _ in range(3):
            at(1, acc.apply_grad, [step, 0], step)
        for rank in (0, 1):
            with pytest.raises(hpc.InvalidArgumentError, match="holds at most 3 grad"):
                at(rank, acc.apply_grad, [9, 9], step)
        # Stale ones are dropped, full or not.
        assert not at(0, acc.apply_grad, [9, 9], step - 1)

        same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [float(step), 0.0])
    with pytest.raises(hpc.InvalidArgumentError, match="must be at most 3"):
        at(0, acc.take_grad, 4, timeout=WAIT)


def test_take_of_a_full_round_can_be_waited_for(full):
    take = Take(full, 0, 3)
    for value in (1, 2, 6):
        assert at(1, full.apply_grad, [value, 0])

    same_bits(take.result(), [3.0, 0.0])


@pytest.mark.ranks(min=2)
def test_old_knowledge_of_a_writer_is_not_trusted(acc):
    # The last word that rank 1 saw is from two rounds ago, of the same parity.
    assert at(1, acc.apply_grad, [1, 0], 0)
    for step in range(2):
        at(0, acc.apply_grad, [3, 0], step)
        at(0, acc.take_grad, 1, timeout=WAIT)
    at(0, acc.apply_grad, [5, 0], 2)

    assert not at(1, acc.apply_grad, [9, 9], 1)
    assert at(1, acc.apply_grad, [7, 0], 2)
    same_bits(at(1, acc.take_grad, 2, timeout=WAIT), [6.0, 0.0])

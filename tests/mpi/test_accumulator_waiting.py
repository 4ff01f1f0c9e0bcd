"""Takes that wait: their order, their timeouts, and ranks that have left."""

import numpy as np
import pytest

import hpcaccum as hpc

from ..common import VAIN, WAIT, same_bits
from .acting import Background, Take, at, everywhere, interrupted, settle, until

pytestmark = pytest.mark.any_size

ALL_BUT_1 = {2: "rank 0", 3: "ranks 0, 2", 4: "ranks 0, 2-3"}


def test_last_gradient_wanted_closes_the_round(acc):
    # The writer closes the round, not the take: the next gradient is of the next round.
    take = Take(acc, 0, 2)

    def burst():
        return [bool(acc.apply_grad([k, 0], 0)) for k in (1, 3, 9, 9)]

    assert at(1, burst) == [True, True, False, False]
    same_bits(take.result(), [2.0, 0.0])


@pytest.mark.ranks(min=2)
def test_place_in_line_that_is_given_up_delays_no_rank(acc):
    first = Take(acc, 1, 1)
    with pytest.raises(hpc.WaitTimeoutError, match="for rank 1, ahead of this rank"):
        at(0, acc.take_grad, 1, timeout=VAIN)
    with pytest.raises(hpc.WaitTimeoutError, match="another thread of this rank"):
        at(1, acc.take_grad, 1, timeout=VAIN)
    last = Take(acc, 2, 1)
    for step in range(2):
        at(0, acc.apply_grad, [step, 0], step)
    assert [take.result()[0] for take in (first, last)] == [0, 1]


@pytest.mark.ranks(min=2)
def test_take_that_gives_up_lets_the_next_one_through(acc):
    first = Take(acc, 0, 5, timeout=0.3)
    at(1, acc.apply_grad, [1, 2])
    second = Take(acc, 1, 1)
    with pytest.raises(hpc.WaitTimeoutError):
        first.result()

    same_bits(second.result(), [1.0, 2.0])


@pytest.mark.ranks(min=2)
def test_interrupted_take_takes_nothing(acc):
    at(0, acc.apply_grad, [1, 0])
    at(1, interrupted, acc.take_grad, 3, timeout=WAIT)
    at(2, acc.apply_grad, [3, 0])

    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), [2.0, 0.0])


@pytest.mark.ranks(min=2)
def test_taking_in_vain_says_who_is_missing(make, size):
    acc = make(name="gradients")
    at(1, acc.apply_grad, [1, 0], 4)
    at(0, acc.set_global_step, 4)

    expected = (
        r"gradients: take_grad\(3\): waited \S+ s for 3 gradients at step 4, had 1"
    )
    for taker, timeout in ((0, VAIN), (1, VAIN), (1, 0)):
        with pytest.raises(hpc.WaitTimeoutError, match=expected) as caught:
            at(taker, acc.take_grad, 3, timeout=timeout)
        assert str(caught.value).endswith(f"(nothing from {ALL_BUT_1[size]})")


def test_threads_of_a_rank_take_one_after_the_other(acc):
    threads = [
        Background(1, lambda: float(acc.take_grad(1, timeout=WAIT)[0]))
        for _ in range(3)
    ]
    for step in range(3):
        at(0, acc.apply_grad, [step, 0], step)
        at(0, until, lambda step=step: acc.global_step == step + 1)

    assert sorted(thread.result() for thread in threads) == [0, 1, 2]


# Each makes its accumulator: a rank that has left does not come back.


@pytest.mark.ranks(min=2)
def test_take_wants_no_more_than_ranks_are_left(rank, size):
    with hpc.ConditionalAccumulator("float64", ()) as acc:
        assert everywhere(lambda: acc.statistics().left) == [()] * size
        take = Take(acc, 0, size)
        everywhere(lambda: acc.apply_grad(rank) if rank < size - 1 else None)
        settle(acc)
        assert not take.over()
        at(size - 1, acc.leave)

        same_bits(take.result(), np.array((size - 2) / 2))
        assert at(0, acc.statistics).left == (size - 1,)
        with pytest.raises(hpc.InvalidArgumentError, match=f"rank {size - 1} has left"):
            at(size - 1, acc.apply_grad, 1, 1)
        at(size - 1, acc.leave)
        # It may still take.
        everywhere(lambda: acc.apply_grad(rank, 1) if rank < size - 1 else None)
        same_bits(at(-1, acc.take_grad, size, timeout=WAIT), np.array((size - 2) / 2))


@pytest.mark.ranks(min=2)
def test_when_all_have_left_takes_end_at_once(rank, size):
    with hpc.ConditionalAccumulator("float64", ()) as acc:
        at(-1, acc.apply_grad, 5)
        take = Take(acc, 0, size + 1)
        everywhere(acc.leave)

        same_bits(take.result(), np.array(5.0))
        for timeout in (0, WAIT):
            text = f"all {size} ranks have left"
            with pytest.raises(hpc.EverybodyLeftError, match=text):
                at(-1, acc.take_grad, 1, timeout=timeout)


@pytest.mark.ranks(min=2)
def test_who_has_left_is_not_missing(size):
    with hpc.ConditionalAccumulator("float64", ()) as acc:
        at(1, acc.leave)
        with pytest.raises(hpc.WaitTimeoutError) as caught:
            at(0, acc.take_grad, size, timeout=VAIN)

    assert str(caught.value).endswith(
        f"{size - 1} gradients at step 0, had 0 (nothing from {ALL_BUT_1[size]})"
    )


@pytest.mark.parametrize(
    ("wanted", "quorums"), [(1, (1, 1)), (3, (2, 1)), (10, (7, 4))]
)
@pytest.mark.ranks(min=3)
def test_quorums_shrink_with_the_workers(wanted, quorums):
    # More than one per worker: in proportion.
    with hpc.ConditionalAccumulator("float64", (), workers=3) as acc:
        for left, quorum in enumerate(quorums, 1):
            at(-left, acc.leave)
            for _ in range(quorum - 1):
                at(0, acc.apply_grad, 1, 9)
            with pytest.raises(hpc.WaitTimeoutError):
                at(1, acc.take_grad, wanted, timeout=0)
            at(0, acc.apply_grad, 1, 9)
            assert at(1, acc.take_grad, wanted, timeout=WAIT) == 1


@pytest.mark.ranks(min=2)
def test_more_ranks_leave_than_there_are_workers():
    with hpc.ConditionalAccumulator("float64", (2,), workers=1) as acc:
        take = Take(acc, 0, 1)
        everywhere(acc.leave)
        with pytest.raises(hpc.EverybodyLeftError, match="all 1 ranks have left"):
            take.result()
        with pytest.raises(hpc.EverybodyLeftError):
            at(1, acc.take_grad, 3, timeout=WAIT)

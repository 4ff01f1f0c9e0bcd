"""Gradients with weights, in accumulators: sum(w g) / sum(w); and `take`.

Gradients and weights are such that sums are exact in any order, so results have the
bits of the naive version wherever the ranks are.
"""

import time

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive
from .acting import VAIN, WAIT, Admitted, Background, Makers, at, meet, same_bits

pytestmark = pytest.mark.any_size

SPARSE = Makers(hpc.SparseConditionalAccumulator)
# More than is sent to another node with the request.
LONG = 9_000
# Rank, weight, and whether the gradient is computed in a slot.
ROUNDS = {
    "one each": [(0, 32, True), (1, 8, False), (2, 0.5, True)],
    "one rank": [(0, 32, True), (0, 8, False), (0, 0.5, False)],
    "a second one": [(1, 4, True), (0, 0.25, False), (1, 16, True)],
    "then one of weight 1": [(0, 4, False), (0, 1, False), (1, 1, True)],
    "equal weights": [(0, 3, True), (0, 3, True), (1, 3, True)],
}


def numbers(taken):
    return taken.count, taken.weight, taken.step


def drawn(number, length=6, dtype="float64"):
    rng = np.random.default_rng(number)
    return rng.integers(-64, 65, length).astype(dtype)


def apply(acc, gradient, step, weight, in_slot):
    """Apply a gradient; return what is in its memory afterwards."""
    if in_slot:
        slot = acc.slot(gradient.shape, timeout=WAIT)
        slot[...] = gradient
        gradient = slot
    assert acc.apply_grad(gradient, step, weight=weight)
    return np.array(gradient)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("storage", ["slots", "sum"])
@pytest.mark.parametrize("order", ROUNDS)
def test_a_gradient_counts_with_its_weight(make, order, storage, reduction):
    options = {"storage": storage, "reduction_type": reduction}
    acc, expected = make("float32", (6,), **options), naive.Accumulator(reduction)
    for step in range(3):
        for number, (rank, weight, in_slot) in enumerate(ROUNDS[order]):
            gradient = drawn(number, dtype="float32")
            kept = at(rank, apply, acc, gradient, step, weight, in_slot)
            same_bits(kept, gradient)  # not multiplied
            expected.apply_grad(gradient, step, weight)

        found = at(step, acc.take, 3, timeout=WAIT)
        assert numbers(found) == (3, expected.weight, step)
        same_bits(found.value, expected.take_grad(3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_half_precision_is_weighted_in_float32(make, dtype):
    acc = make(dtype, (6,))
    gradients = [np.arange(6).astype(acc.dtype) + number for number in range(2)]
    for rank, (gradient, weight) in enumerate(zip(gradients, (3000, 1), strict=True)):
        at(rank, acc.apply_grad, gradient, weight=weight)

    wide = [each.astype("float64") for each in gradients]
    expected = naive.allreduce(wide, weights=[3000, 1])
    found = at(0, acc.take_grad, 2, timeout=WAIT).astype("float64")
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_statistics_have_the_sum_of_the_weights(acc):
    at(0, acc.apply_grad, [1, 2], weight=2.5)
    at(1, acc.apply_grad, [1, 2], weight=4)
    at(1, acc.apply_grad, [1, 2])
    found = at(2, acc.statistics)
    assert (found.num_accumulated, found.weight) == (3, 7.5)

    at(0, acc.take_grad, 1, timeout=WAIT)
    assert not at(1, acc.apply_grad, [1, 2], weight=9)  # it is stale
    found = at(1, acc.statistics)
    assert (found.num_accumulated, found.weight) == (0, 0)


BAD = [0, -1, float("nan"), float("inf"), -0.0, "2", None, [1, 2], True, 1j, 10**400]


def test_what_is_no_weight_is_refused(acc, rows):
    table = rows()
    for weight in BAD:
        for apply in (
            lambda w=weight: acc.apply_grad([1, 2], weight=w),
            lambda w=weight: table.apply_grad([1], [[1, 2]], weight=w),
        ):
            with pytest.raises(hpc.InvalidArgumentError, match="weight must be a fini"):
                at(0, apply)

    assert at(1, acc.num_accumulated) == at(1, table.num_accumulated) == 0
    at(0, acc.apply_grad, [1, 2])
    same_bits(at(1, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])


@pytest.mark.parametrize("weight", [1e-50, 1e50])
def test_a_weight_must_be_a_number_of_the_sum(make, weight):
    with pytest.raises(hpc.InvalidArgumentError, match=r"above 0 \(of float32\)"):
        at(0, make("float16").apply_grad, [1, 2], weight=weight)
    at(0, make("float64").apply_grad, [1, 2], weight=weight)


@pytest.fixture
def rows():
    yield lambda **options: SPARSE("float64", (10, 2), capacity=8, **options)
    SPARSE.take_back()


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
@pytest.mark.parametrize("same_rank", [False, True])
def test_a_row_counts_with_the_weights_of_its_gradients(rows, reduction, same_rank):
    acc = rows(reduction_type=reduction)
    gradients = [([3, 1], 8.0), ([1, 1], 0.5), ([3, 5], 4.0)]
    total, weights = np.zeros((10, 2)), np.zeros((10, 1))
    for number, (indices, weight) in enumerate(gradients):
        values = drawn(number, 4).reshape(2, 2)
        rank = 0 if same_rank else number
        at(rank, acc.apply_grad, indices, values, weight=weight)
        np.add.at(total, indices, weight * values)
        weights[sorted({*indices})] += weight

    taken = at(1, acc.take, 3, timeout=WAIT)
    assert numbers(taken) == (3, 12.5, 0)
    assert taken.value.indices.tolist() == [1, 3, 5]
    expected = total / np.maximum(weights, 0.1) if reduction == "MEAN" else total
    same_bits(taken.value.values, expected[[1, 3, 5]])


@pytest.mark.own_comm
@pytest.mark.parametrize("length", [6, LONG])
@pytest.mark.parametrize("storage", ["slots", "sum"])
def test_weights_travel_between_nodes(group, rank, size, storage, length):
    options = {"storage": storage, "comm": group}
    with hpc.ConditionalAccumulator("float32", (length,), **options) as acc:
        for step in range(4):
            expected = naive.Accumulator()
            number = 1 + step % 2  # gradients of each rank
            for each in range(size * number):
                gradient = drawn(each, length, "float32")
                expected.apply_grad(gradient, 0, 1 + each)
                if each // number == rank:
                    apply(acc, gradient, step, 1 + each, step >= 2)
            if rank == step % size:
                count = size * number
                found = acc.take(count, timeout=WAIT)
                assert numbers(found) == (count, count * (count + 1) / 2, step)
                same_bits(found.value, expected.take_grad(count))
            meet()


# What has arrived when the time is over


@pytest.mark.parametrize("taker", [0, 1])
def test_a_take_may_return_what_has_arrived(acc, taker):
    at(0, acc.apply_grad, [1, 2], weight=3)
    at(1, acc.apply_grad, [5, 6])
    found = at(taker, acc.take, 5, timeout=VAIN, at_least=2)

    assert numbers(found) == (2, 4, 0)
    same_bits(found.value, [2.0, 3.0])
    assert (at(0, acc.num_accumulated), at(0, lambda: acc.global_step)) == (0, 1)


@pytest.mark.parametrize("taker", [0, 1])
def test_a_take_with_too_few_when_the_time_is_over_takes_nothing(acc, taker):
    at(0, acc.apply_grad, [1, 2])
    expected = r"take\(5, at_least=2\): waited \S+ s for 5 gradients at step 0, had 1"
    with pytest.raises(hpc.WaitTimeoutError, match=expected):
        at(taker, acc.take, 5, timeout=VAIN, at_least=2)
    assert (at(0, acc.num_accumulated), at(0, lambda: acc.global_step)) == (1, 0)

    at(2, acc.apply_grad, [3, 4])
    found = at(taker, acc.take, 2, timeout=WAIT, at_least=1)
    assert numbers(found) == (2, 2, 0)


@pytest.mark.ranks(min=2)
def test_a_gradient_that_is_written_at_the_limit_is_returned(make):
    acc = make()
    at(1, acc.apply_grad, [1, 2])
    late = Admitted(acc, 0)
    take = Background(1, lambda: acc.take(5, timeout=VAIN, at_least=2))
    time.sleep(2 * VAIN)
    late.write([3, 4])

    try:
        found = take.result()
    except hpc.WaitTimeoutError:
        # The machine has stood still: the next take returns the round.
        found = at(1, acc.take, 1, timeout=WAIT)
    assert numbers(found) == (2, 2, 0)
    same_bits(found.value, [2.0, 3.0])


def test_rows_that_have_arrived_are_returned(rows):
    acc = rows()
    at(1, acc.apply_grad, [4], [[1, 2]], weight=2)
    found = at(0, acc.take, 3, timeout=VAIN, at_least=1)
    assert (found.value.indices.tolist(), numbers(found)) == ([4], (1, 2, 0))


@pytest.mark.parametrize(
    ("at_least", "error"),
    [(0, hpc.InvalidArgumentError), (3, hpc.InvalidArgumentError), (1.5, TypeError)],
)
def test_at_least_is_a_number_of_gradients(acc, at_least, error):
    with pytest.raises(error, match="at_least must be"):
        at(0, acc.take, 2, at_least=at_least)

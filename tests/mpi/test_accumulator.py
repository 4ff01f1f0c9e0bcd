"""ConditionalAccumulator: one operation at a time, each on another rank."""

import logging

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc

from .acting import WAIT, at, meet, same_bits

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError
BOTH = pytest.mark.parametrize("storage", ["slots", "sum"])


def test_callers_array_may_be_changed_afterwards(acc):
    def apply_and_spoil(array):
        acc.apply_grad(array)
        array[:] = 99
        acc.apply_grad(array[::-1])
        array[:] = -7

    at(1, apply_and_spoil, np.array([1.0, 3.0]))

    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), [50.0, 51.0])


def test_result_is_the_callers(acc):
    at(0, acc.apply_grad, [1, 2])
    kept = []

    def take_and_keep():
        kept.append(acc.take_grad(1, timeout=WAIT))

    at(1, take_and_keep)
    for step in (1, 2, 3):
        at(0, acc.apply_grad, [8, 8], step)
        at(2, acc.take_grad, 1, timeout=WAIT)
    at(0, acc.apply_grad, [9, 9], 4)
    same_bits(at(1, lambda: kept[0]), [1.0, 2.0])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 2) * 4])
@BOTH
def test_scalars_empty_ones_and_many_dimensions(shape, storage):
    with hpc.ConditionalAccumulator("float32", shape, storage=storage) as acc:
        gradient = np.arange(np.prod(shape)).reshape(shape)
        at(0, acc.apply_grad, gradient)
        slot = acc.slot(timeout=WAIT)
        slot[...] = gradient + 2
        at(1, acc.apply_grad, slot)

        same_bits(at(1, acc.take_grad, 2, timeout=WAIT), np.float32(gradient + 1))
        with pytest.raises(INVALID, match="gradient must have shape"):
            at(0, acc.apply_grad, np.ones((2, *shape)), local_step=1)


def test_dimensions_that_are_known_must_be_right(make):
    acc = make(shape=(2, None), capacity=8)
    for wrong in (np.ones(2), np.ones((3, 2)), np.ones((2, 2, 1)), 1.0):
        with pytest.raises(INVALID, match=r"must have shape \(2, None\), got"):
            at(1, acc.apply_grad, wrong)
    at(0, acc.apply_grad, np.ones((2, 4)))
    # The shape of the round is checked before the declared one.
    with pytest.raises(INVALID, match=r"\(2, 4\), like the others"):
        at(1, acc.apply_grad, np.ones(7))

    same_bits(at(1, acc.take_grad, 1, timeout=WAIT), np.ones((2, 4)))
    with pytest.raises(INVALID, match="at most 8 elements"):
        at(0, acc.apply_grad, np.ones((2, 5)), local_step=1)
    assert at(0, acc.apply_grad, np.ones((2, 0)), local_step=1)
    # A stale one is not looked at.
    assert not at(1, acc.apply_grad, np.ones(2), local_step=0)


def test_a_shape_has_at_most_16_dimensions(make):
    acc = make(shape=None, capacity=4)
    with pytest.raises(INVALID, match=r"at most 16 dimensions, got shape .*1, 1\)"):
        at(1, acc.apply_grad, np.ones((1,) * 17))
    assert at(0, acc.apply_grad, np.ones((1,) * 16))
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.ones((1,) * 16))


def test_ranks_use_up_to_1023_shapes():
    with hpc.ConditionalAccumulator("float32", None, capacity=1024) as acc:

        def use(lengths):
            for length in lengths:
                assert acc.apply_grad(np.ones(length), acc.global_step)
                assert acc.take_grad(1, timeout=WAIT).shape == (length,)

        # Those of rank 0 are in memory of its own, which takes a tenth of the time.
        at(0, use, range(1000))
        # Each has one number, whichever rank has used it first.
        at(1, use, range(1022, 980, -1))
        at(-1, use, [0, 7, 1022])
        with pytest.raises(INVALID, match="1023 different shapes"):
            at(0, acc.apply_grad, np.ones(1023), 9999)


DTYPES = ["float16", "bfloat16", "float32", "float64"]
REAL_ARRAYS = [
    [3, 4],
    (3.0, 4.0),
    np.array([3, 4], np.int64),
    np.array([3, 4], np.uint8),
    np.array([3, 4], np.float16),
    np.array([3, 4], ml_dtypes.bfloat16),
    np.array([3, 4], ">f8"),
    np.array([3, 4], np.longdouble),
    np.array([[4, 9], [3, 9]], "f")[::-1, 0],
]


@pytest.mark.parametrize(
    ("dtype", "storage"), [*zip(DTYPES, ["slots", "sum", "sum", "slots"], strict=True)]
)
def test_gradients_are_converted(make, dtype, storage):
    acc = make(dtype, storage=storage)
    for step, gradient in enumerate(REAL_ARRAYS):
        for _ in range(2):
            at(0, acc.apply_grad, gradient, step)
            at(1, acc.apply_grad, gradient, step)

        same_bits(at(1, acc.take_grad, 2, timeout=WAIT), np.array([3, 4], dtype))


def test_local_step_is_cut_to_an_integer(make):
    acc = make()
    for step, number in [
        (1.9, 1),
        (-0.5, 0),
        (True, 1),
        (np.int8(-3), -3),
        (np.array(4), 4),
        (hpc.Variable(np.array(5)), 5),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (np.uint64(7), 7),
    ]:
        receipt = at(1, acc.apply_grad, [1, 1], local_step=step)

        assert receipt == hpc.Receipt(number >= 0, number, 0)
        assert type(receipt.local_step) is int


@BOTH
def test_nan_and_infinity_stay_in_their_round(make, storage):
    acc = make("float32", (4,), storage=storage)

    def strictly(do, *args):
        # As users do to find errors in their code.
        with np.errstate(all="raise"):
            return do(*args)

    for rank, other in enumerate([1, np.inf, -np.inf]):
        at(rank, strictly, acc.apply_grad, [np.nan, np.inf, other, 1e300])
    mean = at(0, strictly, acc.take_grad, 3, None)
    np.testing.assert_array_equal(mean, [np.nan, np.inf, np.nan, np.inf])

    at(1, acc.apply_grad, [1, 2, 3, 4], 1)
    same_bits(at(2, acc.take_grad, 1, timeout=WAIT), np.float32([1, 2, 3, 4]))


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048), ("bfloat16", 256)])
@BOTH
def test_halves_are_summed_in_float32(make, dtype, large, storage):
    acc = make(dtype, (), storage=storage)
    total = make(dtype, (), reduction_type="SUM", storage=storage)
    half = np.array(large, dtype)
    assert half + half.dtype.type(1) == half
    for rank, value in enumerate([large, 1, 1]):
        at(rank, acc.apply_grad, value)

    same_bits(at(1, acc.take_grad, 3, timeout=WAIT), np.array((large + 2) / 3, dtype))
    for rank in range(3):
        at(rank, acc.apply_grad, 40000, 1)
        at(rank, total.apply_grad, 40000)
    same_bits(at(0, acc.take_grad, 3, timeout=WAIT), np.array(40000, dtype))
    beyond = np.inf if dtype == "float16" else 120000
    same_bits(at(1, total.take_grad, 3, timeout=WAIT), np.array(beyond, dtype))


def test_set_global_step_sets_whatever_was(make, caplog):
    acc = make()

    def steps(*values):
        for value in values:
            acc.set_global_step(value)
        return acc.global_step

    with caplog.at_level(logging.WARNING, "hpcaccum"):
        assert at(1, steps, 5, 5, 8) == 8
        assert not caplog.messages
        assert at(1, steps, 2.7) == 2
        assert at(2, steps, -3) == -3
    lowered = "conditional_accumulator: step lowered from 8 to 2"
    assert sum(meet(lowered in caplog.messages)) == 1
    assert at(0, acc.apply_grad, [1, 1], local_step=-3)
    assert not at(0, acc.apply_grad, [1, 1], local_step=-4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@BOTH
def test_a_result_goes_where_it_is_wanted(make, dtype, storage):
    acc = make(dtype, (2, 3), storage=storage)
    grads = [np.full((2, 3), value, dtype) for value in (1, 2, 6)]
    for step in range(3):
        for rank, grad in enumerate(grads):
            at(rank, acc.apply_grad, grad, step)

        def take():
            out = np.full((2, 3), np.nan, dtype)
            return out, acc.take_grad(3, timeout=WAIT, out=out) is out

        found, same = at(step, take)
        assert same
        same_bits(found, np.full((2, 3), 3, dtype))


UNFIT = [
    [0.0, 0.0],
    np.zeros(2, np.float32),
    np.zeros(3),
    np.zeros(4)[::2],
    np.frombuffer(bytes(16)),  # not writable
]


@pytest.mark.parametrize("shape", [(2,), None], ids=["fixed", "free"])
def test_a_result_that_fits_nowhere_is_not_lost(make, shape):
    acc = make(shape=shape, **({} if shape else {"capacity": 4}))
    at(0, acc.apply_grad, np.array([1.0, 2.0]))
    for out in UNFIT:
        with pytest.raises(INVALID, match=r"^out must be"):
            at(1, acc.take_grad, 1, timeout=WAIT, out=out)
        assert at(2, acc.num_accumulated) == 1
    same_bits(at(2, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0])

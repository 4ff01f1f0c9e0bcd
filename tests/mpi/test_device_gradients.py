"""ConditionalAccumulator with gradients on a device."""

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import ConditionalAccumulator, InvalidArgumentError
from hpcaccum.dtypes import accumulation_dtype

from .on_device import FEW_RANKS
from .training import meet, raised

pytestmark = [FEW_RANKS, pytest.mark.any_size]

N = 1000


@pytest.fixture(params=["slots", "sum"])
def make(request, comm, keep):
    """Return a function that makes an accumulator."""

    def make(dtype=np.float32, shape=(N,), **options):
        options = {"storage": request.param, "comm": comm} | options
        return keep(ConditionalAccumulator(dtype, shape, **options))

    return make


def drawn(rank, dtype=np.float32):
    # Sums of small integers are exact in any order.
    return np.random.default_rng(rank).integers(-9, 9, N).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "float64"])
def test_gradients_of_the_device_are_added(cp, make, rank, size, dtype):
    acc, wide = make(dtype), accumulation_dtype(np.dtype(dtype))
    for step in range(3):
        grad = cp.asarray(drawn(rank, dtype))
        grad *= 2
        assert acc.apply_grad(grad, step)
        grad.fill(0)  # allowed after the call
        meet()
        if rank == 0:
            found = acc.take_grad(size).astype(wide)
            total = sum(2 * drawn(other, wide) for other in range(size))
            mean = (total / wide.type(size)).astype(dtype)
            np.testing.assert_array_equal(found, mean.astype(wide))
        meet()


def test_several_of_one_rank_and_of_any_dtype(cp, make, rank, size):
    acc = make(shape=(2, N // 2), reduction_type="SUM")
    for dtype in ("float32", "float16", "float64"):
        acc.apply_grad(cp.asarray(drawn(rank, dtype)).reshape(2, -1))
        acc.apply_grad(drawn(rank, dtype).reshape(2, -1))
    meet()
    if rank == 0:
        total = 6 * sum(drawn(other) for other in range(size))
        np.testing.assert_array_equal(acc.take_grad(6 * size).ravel(), total)


def test_what_is_taken_may_go_to_the_device(cp, make, rank, size):
    acc = make()
    acc.apply_grad(cp.asarray(drawn(rank)))
    meet()
    if rank == size - 1:
        out = cp.full((N,), -7, np.float32)
        assert acc.take_grad(size, out=out) is out
        mean = sum(drawn(other) for other in range(size)) / np.float32(size)
        np.testing.assert_array_equal(out.get(), mean.astype(np.float32))


def test_a_stale_gradient_is_not_even_copied(cp, make, rank, monkeypatch):
    # A shorter one may be part of the request to admit it.
    acc = make(shape=(3 * N,))
    meet(acc.set_global_step(1) if rank == 0 else None)
    grad = cp.ones(3 * N, np.float32)
    monkeypatch.setattr(type(grad), "get", None)
    receipt = acc.apply_grad(grad, 0)

    assert not receipt
    assert receipt.lag == 1


def test_shapes_that_are_not_fixed(cp, make, rank, size):
    acc = make(shape=None, capacity=N)
    acc.apply_grad(cp.asarray(drawn(rank)).reshape(4, -1))
    meet()
    if rank == 0:
        assert acc.take_grad(size).shape == (4, N // 4)


def test_slots_are_pinned_until_they_are_freed(cp, pinned, make, rank):
    acc = make()
    assert not pinned
    for _ in range(2):
        acc.apply_grad(cp.asarray(drawn(rank)))
    assert len(pinned) == (acc.statistics().storage == "slots")
    acc.free()


def test_bad_gradients_leave_nothing_behind(cp, make, rank, size):
    acc = make()
    bad = {
        "contiguous": cp.ones(2 * N, np.float32)[::2],
        "got int64": cp.ones(N, np.int64),
        "shape (1000,), got shape (999,)": cp.ones(N - 1, np.float32),
    }
    for message, grad in bad.items():
        error = raised(acc.apply_grad, grad)
        assert type(error) is InvalidArgumentError
        assert message in str(error)
    outs = {
        "must be float32 (1000,)": cp.ones(N, np.float64),
        "contiguous": cp.ones(2 * N, np.float32)[::2],
    }
    for message, out in outs.items():
        error = raised(acc.take_grad, 1, out=out, timeout=0)
        assert type(error) is InvalidArgumentError
        assert message in str(error)
    assert acc.num_accumulated() == 0

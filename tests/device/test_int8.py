"""Gradients in eight bits, and what that loses."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.device import int8

INVALID = hpc.InvalidArgumentError
TAKEN = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class Model:
    """The same in NumPy."""

    def __init__(self, size):
        self.size = size
        self.residual = np.zeros(size, np.float32)

    def compress(self, gradient):
        """Return integers and scales."""
        error = gradient.astype(np.float32).ravel() + self.residual
        groups = np.zeros(-(-self.size // 1024) * 1024, np.float32)
        groups[: self.size] = error
        groups = groups.reshape(-1, 1024)
        scales = np.abs(groups).max(axis=1) / np.float32(127)
        safe = np.where(scales > 0, scales, np.float32(1))
        q = np.clip(np.rint(groups / safe[:, None]), -127, 127)
        self.residual = error - (q * scales[:, None]).ravel()[: self.size]
        return q.ravel()[: self.size].astype(np.int8), scales


@pytest.mark.parametrize("dtype", TAKEN, ids=str)
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5003])
def test_compressor_does_what_the_model_does(size, dtype):
    random = np.random.default_rng(size)
    compressor, model = int8.Int8Compressor(size), Model(size)
    for _ in range(3):
        gradient = random.normal(size=size).astype(dtype)
        compressed = compressor.compress(cupy.asarray(gradient))
        q, scales = model.compress(gradient)

        # The device may multiply and subtract in one rounding: a tie may differ.
        np.testing.assert_allclose(compressed.scales.get(), scales, rtol=1e-5)
        off = np.abs(compressed.q.get().astype(int) - q)
        assert off.max() <= 1
        assert (off > 0).mean() <= 0.01
        unit = np.repeat(scales, 1024)[:size]
        residual = compressor.residual.get()
        assert (np.abs(residual) <= 0.501 * unit).all()
        model.residual = residual


def test_nothing_is_lost_over_many_steps():
    size, steps = 2000, 50
    random = np.random.default_rng(0)
    compressor = int8.Int8Compressor(size)
    total, exact = cupy.zeros(size, "f"), np.zeros(size)
    for _ in range(steps):
        gradient = random.normal(size=size).astype("f")
        exact += gradient
        int8.accumulate(total, compressor.compress(cupy.asarray(gradient)))
    lost = exact - total.get()

    np.testing.assert_allclose(lost, compressor.residual.get(), atol=2e-4)
    # Half of a unit of the last step, not of all steps.
    assert np.abs(lost).max() < 0.02


@pytest.mark.parametrize("shape", [(), (0,), (3, 700), 1500])
def test_shapes(shape):
    compressor = int8.Int8Compressor(shape)
    shape = (shape,) if isinstance(shape, int) else shape
    gradient = np.random.default_rng(1).integers(-127, 128, shape).astype("f")
    flat = gradient.reshape(-1)
    flat[::1024] = 127
    compressed = compressor.compress(cupy.asarray(gradient))

    assert compressed.shape == shape
    assert compressed.nbytes == gradient.size + 4 * -(-gradient.size // 1024)
    # Units of 1: exact.
    np.testing.assert_array_equal(int8.decompress(compressed).get(), gradient)
    assert compressor.residual.shape == shape
    assert not compressor.residual.get().any()


def test_accumulate_adds_scaled():
    gradient = np.array([127.0, -3, 0, 64], "f")
    compressed = int8.Int8Compressor(4).compress(cupy.asarray(gradient))
    total = cupy.asarray(np.array([1, 2, 3, 4], "f"))
    int8.accumulate(total, compressed, 0.5)

    assert total.get().tolist() == [64.5, 0.5, 3.0, 36.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_stays_so_and_is_forgotten(bad):
    compressor = int8.Int8Compressor(3000)
    gradient = np.ones(3000, "f")
    gradient[1500] = bad
    told = int8.decompress(compressor.compress(cupy.asarray(gradient))).get()
    assert np.isnan(told[1024:2048]).all()
    np.testing.assert_allclose(np.delete(told, range(1024, 2048)), 1, rtol=1e-6)

    ones = compressor.compress(cupy.ones(3000, "f"))
    np.testing.assert_allclose(int8.decompress(ones).get(), 1, rtol=1e-2)


def test_what_does_not_fit_is_refused():
    compressor = int8.Int8Compressor((2, 3))
    good = cupy.ones((2, 3), "f")
    for wrong, text in [
        (good.get(), "gradient must be an array on the device"),
        (good.reshape(6), r"gradient must have shape \(2, 3\), got \(6,\)"),
        (good.astype("d"), "must be of float32, float16, bfloat16, got float64"),
        (cupy.ones((2, 6), "f")[:, ::2], "must be contiguous"),
    ]:
        with pytest.raises(INVALID, match=text):
            compressor.compress(wrong)
    assert not compressor.residual.get().any()
    compressed = compressor.compress(good)
    for wrong, text in [
        (good.get(), "total must be an array on the device"),
        (cupy.ones(6, "f"), r"total must have shape \(2, 3\)"),
        (good.astype("d"), "total: .* must be of float32, got float64"),
    ]:
        with pytest.raises(INVALID, match=text):
            int8.accumulate(wrong, compressed)

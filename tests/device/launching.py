"""Kernels called by name on arrays between guards."""

from __future__ import annotations

import os

import cupy
import ml_dtypes
import numpy as np

from hpcaccum.device import kernels

SIZES = [0, 1, 2, 3, 31, 32, 33, 1023, 1024, 1025, 5003]
if os.environ.get("CPU_CUDA_CHECKS"):
    # The checks are slow: the least sizes that cover every branch of a kernel.
    SIZES = [3, 1025]
DTYPES = {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
SUMS = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}

# 256 bytes, as CuPy's own arrays begin: so `shift` alone decides how a view is aligned.
_AROUND = 256


class Watched:
    """A device array with guards before and after it.

    Args:
        values: Its initial values.
        shift: Elements by which it is moved off its alignment.
    """

    def __init__(self, values, shift=0):
        self.values = np.ascontiguousarray(values)
        self.shape = self.values.shape
        flat = self.values.ravel()
        self._begin = _AROUND // flat.itemsize + shift
        self._end = self._begin + flat.size
        memory = np.full(self._end + _AROUND // flat.itemsize, 77, flat.dtype)
        memory[self._begin : self._end] = flat
        self._memory = cupy.asarray(memory)
        self.array = self._memory[self._begin : self._end].reshape(self.shape)

    def get(self):
        """Return the values on the device; fail if the guards have changed."""
        memory = self._memory.get()
        assert (memory[: self._begin] == 77).all(), "written before the array"
        assert (memory[self._end :] == 77).all(), "written past the array"
        return memory[self._begin : self._end].reshape(self.shape)


def forget_kernels():
    """Forget what was read and compiled, and what was found wrong."""
    for function in kernels.source, kernels._module, kernels._kernel:
        function.cache_clear()


def launch(name, *args, size=None, blocks=None):
    """Launch as the package does, over ``size`` elements or with ``blocks`` blocks."""
    grid = blocks or kernels.blocks(size)
    given = [arg.array if isinstance(arg, Watched) else arg for arg in args]
    kernels.kernel(name)((grid,), (kernels.THREADS,), given)


def i64(value):
    return np.int64(value)


def numbers(size, dtype, seed=0):
    """Return numbers whose products and small sums are exact in float32."""
    random = np.random.default_rng([size, seed])
    return (random.integers(-64, 65, size) / 16).astype(dtype)


def normal(size, dtype, seed=0):
    return np.random.default_rng([size, seed]).normal(size=size).astype(dtype)

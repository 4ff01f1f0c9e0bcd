"""Random numbers: NumPy's, on the device."""

from __future__ import annotations

import numpy as np

from .. import _transfer


class Generator:
    """Draws; not the numbers that CuPy's would draw."""

    def __init__(self, bit_generator):
        self._numpy = np.random.Generator(bit_generator)

    def _array(self, values, dtype):
        return _transfer.array(np.asarray(values, dtype))

    def standard_normal(self, size=None, dtype=np.float64):
        return self._array(self._numpy.standard_normal(size), dtype)

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        drawn = self._numpy.integers(low, high, size, dtype, endpoint)
        return self._array(drawn, dtype)


def default_rng(seed=None):
    return Generator(np.random.default_rng(seed).bit_generator)

"""Gradients in eight bits on the device; what that loses goes to the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcaccum.device import kernels
from hpcaccum.device.arrays import cupy
from hpcaccum.device.multi_tensor import check_device_array
from hpcaccum.dtypes import BFLOAT16

# Elements that share a scale, as the kernels have it.
GROUP = 1024

_FLOAT32 = np.dtype(np.float32)
_TAKEN = (_FLOAT32, np.dtype(np.float16), BFLOAT16)


@dataclass(frozen=True, eq=False)
class Int8Gradient:
    """A gradient as small integers: element ``i`` is ``q[i] * scales[i // 1024]``.

    Attributes:
        q: int8, a vector, -127 to 127; on the device.
        scales: float32, one for each 1024 elements; NaN where an element was not
            finite, and so is the whole group then.
        shape: Of the gradient.
    """

    q: Any
    scales: Any
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it all: a quarter of those of float32, and 4 for each 1024."""
        return int(self.q.nbytes + self.scales.nbytes)


class Int8Compressor:
    """Compresses one gradient after the other on the current device.

    What rounding loses is added to the next gradient (error feedback), so that over
    many steps nothing is lost. Each gradient that is to be compressed needs a
    compressor of its own. Work is queued on the current stream, which must be the same
    one each time, or be ordered by events.

    Args:
        shape: Of the gradients, or their number of elements.

    Attributes:
        residual: What has been lost so far; float32 of that shape, on the device. To be
            saved with a checkpoint.

    Sources: Seide et al. 2014, 1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs; Karimireddy et al. 2019, Error
    feedback fixes SignSGD and other gradient compression schemes (arXiv:1901.09847).
    """

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        self._shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._size = math.prod(self._shape)
        self._groups = -(-self._size // GROUP)
        self.residual: Any = cupy().zeros(self._shape, _FLOAT32)

    def compress(self, gradient: Any) -> Int8Gradient:
        """Return a gradient, plus what the ones before it lost, in eight bits.

        Args:
            gradient: Of float32, float16 or bfloat16, contiguous, on the device.

        Raises:
            InvalidArgumentError: For another dtype, shape or place; nothing is changed.
        """
        check_device_array("gradient", gradient, self._shape, _TAKEN)
        module = cupy()
        q = module.empty(self._size, np.int8)
        scales = module.empty(self._groups, _FLOAT32)
        if self._groups:
            kernels.kernel(f"compress_int8_{kernels.SUFFIXES[gradient.dtype]}")(
                # Two warps do a group.
                *kernels.streaming(self._size // 4),
                (gradient, self.residual, q, scales, np.int64(self._size)),
            )
        return Int8Gradient(q, scales, self._shape)


def accumulate(total: Any, compressed: Int8Gradient, scale: float = 1.0) -> None:
    """Add a compressed gradient, times ``scale``, to a sum.

    Args:
        total: float32 of the gradient's shape, contiguous, on the device.
        compressed: The gradient.
        scale: A factor.

    Raises:
        InvalidArgumentError: For another dtype, shape or place; nothing is changed.
    """
    check_device_array("total", total, compressed.shape, (_FLOAT32,))
    _add(total, compressed, scale)


def decompress(compressed: Int8Gradient) -> Any:
    """Return a compressed gradient as a new array of float32."""
    total = cupy().zeros(compressed.shape, _FLOAT32)
    _add(total, compressed, 1.0)
    return total


def _add(total: Any, compressed: Int8Gradient, scale: float) -> None:
    size = total.size
    if size:
        q, scales = compressed.q, compressed.scales
        kernels.kernel("accumulate_int8_f32")(
            *kernels.streaming(size),
            # No header: always added.
            (
                *(total, q, scales, np.float32(scale), np.int64(size)),
                *(None, np.int64(0), None),
            ),
        )

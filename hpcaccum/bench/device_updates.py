"""Updates of variables by an optimizer's kernel, beside plain CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcaccum import device
from hpcaccum.bench.device_case import (
    Contest,
    DeviceCase,
    DeviceMemory,
    check_same,
    launch,
)

if TYPE_CHECKING:
    from hpcaccum.bench.device_case import Buffers

# As hpcaccum.Adam's, in the order of the kernel: beta1, 1 - beta1, beta2, ...
_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
_SCALARS = (_RATE, 0.0, _BETA1, 1 - _BETA1, _BETA2, 1 - _BETA2, _EPSILON)


class Updates(DeviceCase):
    """One variable, updated once."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(12)

    def make(self, count: int) -> Buffers:
        """Return a gradient, a variable, and the state of an optimizer."""
        cupy, source = device.cupy(), self.normal(count)
        names = "target", "value", "m", "v", "scratch"
        return {"source": source, **{name: cupy.empty_like(source) for name in names}}

    def spoil(self, buffers: Buffers) -> None:
        """Fill the variable with 3, and forget all former gradients."""
        buffers["value"].fill(3)
        buffers["m"].fill(0)
        buffers["v"].fill(0)

    def compete(self, nbytes: int) -> list[Contest]:
        """Return what is measured."""
        return [
            Contest("sgd", _sgd, _cupy_sgd, 3 * nbytes, _check_sgd),
            Contest("adam", _adam, _cupy_adam, 7 * nbytes, _check_adam),
        ]


def _sgd(b: Buffers) -> None:
    count = b["value"].size
    launch("sgd_f32", count, b["value"], b["source"], np.int64(count), np.float32(1))


def _cupy_sgd(b: Buffers) -> None:
    # With a rate of 1 that is all; any other needs a second pass.
    device.cupy().subtract(b["value"], b["source"], out=b["value"])


def _check_sgd(b: Buffers) -> None:
    check_same(b["value"], np.float32(3) - b["source"])


def _adam(b: Buffers) -> None:
    arrays = b["value"], b["source"], b["m"], b["v"]
    count = b["value"].size
    launch("adam_f32", count, *arrays, np.int64(count), *map(np.float32, _SCALARS))


def _cupy_adam(b: Buffers) -> None:
    cupy, grad, scratch, m, v = device.cupy(), b["source"], b["scratch"], b["m"], b["v"]
    cupy.multiply(m, _BETA1, out=m)
    cupy.multiply(grad, 1 - _BETA1, out=scratch)
    cupy.add(m, scratch, out=m)
    cupy.multiply(v, _BETA2, out=v)
    cupy.multiply(grad, grad, out=scratch)
    cupy.multiply(scratch, 1 - _BETA2, out=scratch)
    cupy.add(v, scratch, out=v)
    cupy.sqrt(v, out=scratch)
    cupy.add(scratch, _EPSILON, out=scratch)
    cupy.divide(m, scratch, out=scratch)
    cupy.multiply(scratch, _RATE, out=scratch)
    cupy.subtract(b["value"], scratch, out=b["value"])


def _check_adam(b: Buffers) -> None:
    """After one gradient, m and v are known, and so is the step."""
    grad = b["source"]
    check_same(b["m"], grad * np.float32(1 - _BETA1), 1e-6)
    check_same(b["v"], grad * grad * np.float32(1 - _BETA2), 1e-5)
    root = device.cupy().sqrt(b["v"]) + np.float32(_EPSILON)
    check_same(b["value"], 3 - np.float32(_RATE) * b["m"] / root, 1e-6)

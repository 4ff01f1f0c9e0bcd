"""Updates of a variable by an optimizer, compared with plain CuPy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcaccum import device
from hpcaccum.bench.device_case import Contest, DeviceCase, DeviceMemory, check_same
from hpcaccum.optimizers import SGD, Adam, Variable

if TYPE_CHECKING:
    from hpcaccum.bench.device_case import Buffers

_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
# With the bias correction of the first update.
_FIRST_RATE = _RATE * math.sqrt(1 - _BETA2) / (1 - _BETA1)


class UpdatesOnDevice(DeviceCase):
    """One variable, updated once."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(12)

    def make(self, count: int) -> Buffers:
        """Return a gradient, a variable, and two optimizers with their state."""
        cupy, source = device.cupy(), self.normal(count)
        target, value, scratch = (cupy.empty_like(source) for _ in range(3))
        variable = Variable(value, "value")
        pairs = [(source, variable)]
        sgd, adam = SGD(1), Adam(_RATE, _BETA1, _BETA2, _EPSILON)
        adam.apply_gradients(pairs)
        m, v, step = (each.value for each in adam.variables())
        return {
            **{"source": source, "target": target, "value": value, "scratch": scratch},
            **{"m": m, "v": v, "step": step, "pairs": pairs, "sgd": sgd, "adam": adam},
        }

    def spoil(self, buffers: Buffers) -> None:
        """Fill the variable with 3 and reset the state."""
        buffers["value"].fill(3)
        for name in ("m", "v", "step"):
            buffers[name].fill(0)

    def compete(self, nbytes: int) -> list[Contest]:
        """Return the measured operations."""
        return [
            Contest("sgd", _sgd, _cupy_sgd, 3 * nbytes, _check_sgd),
            Contest("adam", _adam, _cupy_adam, 7 * nbytes, _check_adam),
        ]


def _sgd(b: Buffers) -> None:
    b["sgd"].apply_gradients(b["pairs"])


def _cupy_sgd(b: Buffers) -> None:
    # Complete only with a rate of 1: any other needs a second pass.
    device.cupy().subtract(b["value"], b["source"], out=b["value"])


def _check_sgd(b: Buffers) -> None:
    check_same(b["value"], np.float32(3) - b["source"])


def _adam(b: Buffers) -> None:
    b["adam"].apply_gradients(b["pairs"])


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
    cupy.multiply(scratch, _FIRST_RATE, out=scratch)
    cupy.subtract(b["value"], scratch, out=b["value"])


def _check_adam(b: Buffers) -> None:
    """Check m, v and the variable after one gradient."""
    grad = b["source"]
    check_same(b["m"], grad * np.float32(1 - _BETA1), 1e-6)
    check_same(b["v"], grad * grad * np.float32(1 - _BETA2), 1e-5)
    root = device.cupy().sqrt(b["v"]) + np.float32(_EPSILON)
    check_same(b["value"], 3 - np.float32(_FIRST_RATE) * b["m"] / root, 1e-6)

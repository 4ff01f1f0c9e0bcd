"""Raw kernels: compiled for the CPU, launched as late as all work."""

from __future__ import annotations

import sys

import numpy as np

from . import _compute
from ._errors import CUDARuntimeError
from .cuda.compiler import CompileException
from .cuda.device import get_device_id
from .cuda.stream import _queue_of


class RawModule:
    """The kernels of a CUDA source, compiled when one is asked for."""

    def __init__(self, code=None, *, options=(), backend="nvrtc"):
        self.code, self.options, self.backend = code, tuple(options), backend

    def get_function(self, name):
        from cpu_cuda import CudaError, build

        try:
            return _Kernel(build(self.code, options=self.options), name)
        except CudaError as error:
            facts = self.code, "kernel.cu", self.options, self.backend
            raise CompileException(str(error), *facts) from error


class _Kernel:
    """A kernel of a CUDA source."""

    def __init__(self, module, name):
        self._module, self.name = module, name

    def __call__(self, grid, block, args):
        """Queue a launch; the next wait reports an error of the kernel."""
        grid, block = _sizes(grid), _sizes(block)
        values = [_argument(each) for each in args]
        place = _caller()

        def action():
            _check_places(values)
            try:
                self._module.launch(self.name, grid, block, values)
            except Exception as error:
                raise CUDARuntimeError(719, f"{error}; launched at {place}") from error

        _queue_of().put(action)


class _Pointer:
    """What a kernel sees of an array; does not keep its memory, as on a device."""

    def __init__(self, ptr, nbytes, device, wanted):
        self.ptr, self.nbytes = ptr, nbytes
        self.device, self.wanted = device, wanted


def _argument(value):
    if _compute.is_array(value):
        host, device = value._host, value._memory.device_id
        span = sum(
            (n - 1) * abs(step)
            for n, step in zip(host.shape, host.strides, strict=True)
        )
        nbytes = span + host.itemsize if host.size else 0
        return _Pointer(value.data.ptr, nbytes, device, get_device_id())
    if value is None or isinstance(value, np.generic):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _check_places(values):
    for number, value in enumerate(values):
        if isinstance(value, _Pointer) and value.device != value.wanted:
            raise CUDARuntimeError(
                700, f"argument {number} lies on device {value.device}"
            )


def _sizes(sizes):
    # CuPy, too, makes one of a zero.
    return tuple(max(1, int(each)) for each in (*sizes, 1, 1)[:3])


def _caller():
    """Return file and line of who launched."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Copies between the host and the device, as late as the memory allows."""

from __future__ import annotations

import numpy as np

from . import _compute
from .cuda import pinned_memory, runtime
from .cuda.device import Device
from .cuda.stream import _queue_of


def get(array, stream, order, out, blocking):
    """Do as `ndarray.get`."""
    new = out is None
    if new:
        if order == "A":
            order = "F" if array._host.flags.fnc else "C"
        out = np.empty(array.shape, array.dtype, order)
    else:
        _check_out(array, out)
    with Device(array._memory.device_id):
        # As in CuPy: packed in the current stream, whatever stream copies.
        flags, want = array._host.flags, out.flags
        same = flags.c_contiguous and want.c_contiguous
        if not (same or (flags.f_contiguous and want.f_contiguous)):
            array = array.copy("C" if want.c_contiguous else "F")
        queue = _queue_of(stream)
        _fetch(array, out, queue, late=new and not blocking)
        if blocking:
            queue.synchronize()
    return out


def _fetch(packed, out, queue, *, late):
    if late:
        # CuPy may take pinned memory for this.
        host = packed._host
        queue.put(lambda: np.copyto(out, host))
    elif out.nbytes:
        address, source = out.ctypes.data, packed._host.ctypes.data
        runtime._copy_bytes(address, source, out.nbytes, queue, to_device=False)


def _check_out(array, out):
    if not isinstance(out, np.ndarray):
        raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
    if out.dtype != array.dtype:
        raise TypeError(
            f"{out.dtype} array cannot be obtained from {array.dtype} array"
        )
    if out.shape != array.shape:
        raise ValueError(
            f"Shape mismatch. Expected shape: {array.shape}, actual shape: {out.shape}"
        )
    if not out.flags.forc:
        raise RuntimeError("Cannot copy to non-contiguous array")


def set(array, values, stream):
    """Do as `ndarray.set`."""
    if not isinstance(values, np.ndarray):
        raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
    if values.dtype != array.dtype:
        raise TypeError(f"{values.dtype} array cannot be set to {array.dtype} array")
    if values.shape != array.shape:
        raise ValueError(
            f"Shape mismatch. Old shape: {array.shape}, new shape: {values.shape}"
        )
    flags = array._host.flags
    if not flags.forc:
        raise RuntimeError("Cannot set to non-contiguous array")
    order = "C" if flags.c_contiguous else "F"
    with Device(array._memory.device_id):
        _send(array, np.asarray(values, order=order), _queue_of(stream))


def _send(array, values, queue):
    if values.nbytes:
        address = array._host.ctypes.data
        source = values.ctypes.data
        runtime._copy_bytes(address, source, values.nbytes, queue, to_device=True)


def array(values, dtype=None, order="C", ndmin=0):
    """Return an array of the current device with values of the host.

    From pinned memory they are read late, as in CuPy, unless they must be converted.
    """
    values = np.array(values, dtype, copy=None, ndmin=ndmin)
    order = "F" if order in ("F", "f") or (order == "K" and values.flags.fnc) else "C"
    new = _compute.new(values.shape, values.dtype, order)
    _send(new, np.asarray(values, order=order), _queue_of())
    return new


def empty_pinned(shape, dtype, order):
    """Return a NumPy array in pinned memory."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    memory = pinned_memory.empty(count * dtype.itemsize)
    return np.ndarray(shape, dtype, memory, order=order)

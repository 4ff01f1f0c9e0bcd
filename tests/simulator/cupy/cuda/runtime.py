"""The CUDA runtime API, the part that programs call themselves."""

from __future__ import annotations

import ctypes

from .._errors import CUDARuntimeError as CUDARuntimeError
from . import pinned_memory
from .device import _count, get_device_id


def getDeviceCount():
    return _count()


def getDevice():
    return get_device_id()


def getDeviceProperties(device):
    return {"name": b"Simulated device"}


def driverGetVersion():
    """Return the version of the driver; 0 without one."""
    try:
        return 13000 if _count() else 0
    except CUDARuntimeError:
        return 0


def hostRegister(ptr, size, flags):
    get_device_id()
    pinned_memory._register(ptr, size)


def hostUnregister(ptr):
    get_device_id()
    pinned_memory._unregister(ptr)


def _copy_bytes(target, source, size, queue, *, to_device):
    """Copy between host and device as cudaMemcpyAsync does.

    Source: CUDA Runtime API, "API synchronization behavior": from pageable memory the
    host's bytes are taken before return, to pageable memory all is done at return.
    """
    host = source if to_device else target
    if pinned_memory._pinned(host, size):
        queue.put(lambda: ctypes.memmove(target, source, size), host=(host, size))
    elif to_device:
        now = ctypes.string_at(source, size)
        queue.put(lambda: ctypes.memmove(target, now, size))
    else:
        queue.put(lambda: ctypes.memmove(target, source, size))
        queue.synchronize()

"""The CUDA runtime API, the part that programs call themselves."""

from __future__ import annotations

import ctypes

from .._errors import CUDARuntimeError
from . import pinned_memory
from .device import Device, _count, get_device_id
from .memory import _on_device

__all__ = [
    "CUDARuntimeError",
    "deviceSynchronize",
    "driverGetVersion",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "hostRegister",
    "hostUnregister",
    "memcpyDefault",
    "memcpyDeviceToDevice",
    "memcpyDeviceToHost",
    "memcpyHostToDevice",
    "memcpyHostToHost",
]

memcpyHostToHost = 0
memcpyHostToDevice = 1
memcpyDeviceToHost = 2
memcpyDeviceToDevice = 3
memcpyDefault = 4


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


def deviceSynchronize():
    Device().synchronize()


def hostRegister(ptr, size, flags):
    get_device_id()
    pinned_memory._register(ptr, size)


def hostUnregister(ptr):
    get_device_id()
    pinned_memory._unregister(ptr)


def _copy_bytes(target, source, size, kind, queue):
    """Copy as cudaMemcpyAsync does.

    Source: CUDA Runtime API, "API synchronization behavior": from pageable memory the
    host's bytes are taken before return, to pageable memory all is done at return.
    """
    if kind not in range(5):
        raise CUDARuntimeError(1)
    if not size:
        return
    if kind == memcpyDefault:
        kind = 2 * _on_device(source) + _on_device(target)
    host = source if kind == 1 else target if kind == 2 else 0
    if kind == memcpyHostToHost:
        queue.synchronize()
        ctypes.memmove(target, source, size)
    elif host and not pinned_memory._pinned(host, size):
        _copy_pageable(target, source, size, kind, queue)
    else:
        used = (host, size) if host else ()
        queue.put(lambda: ctypes.memmove(target, source, size), host=used)


def _copy_pageable(target, source, size, kind, queue):
    if kind == memcpyHostToDevice:
        now = ctypes.string_at(source, size)
        queue.put(lambda: ctypes.memmove(target, now, size))
    else:
        queue.put(lambda: ctypes.memmove(target, source, size))
        queue.synchronize()

"""The CUDA runtime API, the part that programs call themselves."""

from __future__ import annotations

import ctypes

from .._errors import CUDARuntimeError
from . import pinned_memory
from .device import Device, _count, get_device_id
from .memory import _on_device
from .stream import _queue_of

__all__ = [
    "CUDARuntimeError",
    "deviceSynchronize",
    "driverGetVersion",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "hostRegister",
    "hostUnregister",
    "memcpy",
    "memcpyAsync",
    "memcpyDefault",
    "memcpyDeviceToDevice",
    "memcpyDeviceToHost",
    "memcpyHostToDevice",
    "memcpyHostToHost",
    "runtimeGetVersion",
    "setDevice",
    "streamSynchronize",
]

memcpyHostToHost = 0
memcpyHostToDevice = 1
memcpyDeviceToHost = 2
memcpyDeviceToDevice = 3
memcpyDefault = 4


def getDeviceCount():
    """Return the number of devices."""
    return _count()


def getDevice():
    """Return the number of the current device."""
    return get_device_id()


def setDevice(device):
    """Make a device the current one."""
    Device(device).use()


def getDeviceProperties(device):
    """Return a few properties."""
    capability = Device(device).compute_capability
    return {
        "name": b"Simulated device",
        "major": int(capability[:-1]),
        "minor": int(capability[-1]),
        "multiProcessorCount": Device(device).attributes["MultiProcessorCount"],
        "totalGlobalMem": Device(device).mem_info[1],
    }


def driverGetVersion():
    """Return the version of the driver; 0 without one."""
    try:
        return 13000 if _count() else 0
    except CUDARuntimeError:
        return 0


def runtimeGetVersion():
    """Return the version of the runtime."""
    return 13000


def deviceSynchronize():
    """Wait for all streams of the current device."""
    Device().synchronize()


def streamSynchronize(stream):
    """Wait for a stream, given its address."""
    _queue_of(stream).synchronize()


def hostRegister(ptr, size, flags):
    """Pin host memory."""
    get_device_id()
    pinned_memory._register(ptr, size)


def hostUnregister(ptr):
    """Make it ordinary memory again."""
    get_device_id()
    pinned_memory._unregister(ptr)


def memcpyAsync(dst, src, size, kind, stream):
    """Copy bytes; how far the host waits depends on what memory it is."""
    _copy_bytes(dst, src, size, kind, _queue_of(stream))


def memcpy(dst, src, size, kind):
    """Copy bytes in the null stream, and wait."""
    queue = _queue_of(0)
    _copy_bytes(dst, src, size, kind, queue)
    queue.synchronize()


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

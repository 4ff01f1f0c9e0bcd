"""Pinned host memory: what the device copies from and to while the host goes on."""

from __future__ import annotations

import collections
import ctypes
import sys

from .._errors import CUDARuntimeError
from . import memory as _memory
from .device import get_device_id

__all__ = ["PinnedMemory", "PinnedMemoryPointer", "alloc_pinned_memory"]

_free = collections.defaultdict(list)  # bytes -> addresses, as CuPy's pool keeps them
_pool = {}  # address -> bytes
_registered = {}  # address -> bytes: the caller's own memory


def _pinned(address, nbytes):
    """Whether the device can access these bytes directly."""
    return any(
        first <= address and address + nbytes <= first + size
        for ranges in (_pool, _registered)
        for first, size in list(ranges.items())
    )


def _overlaps(address, nbytes):
    return any(
        first < address + nbytes and address < first + size
        for ranges in (_pool, _registered)
        for first, size in list(ranges.items())
    )


class PinnedMemory:
    """Page-locked memory; goes to the next one who asks, whatever is under way."""

    def __init__(self, size, flags=0):
        get_device_id()
        self.size = size
        if _free[size]:
            self.ptr = _free[size].pop()
        else:
            self.ptr = _memory._allocate(size)
            _pool[self.ptr] = size

    def __del__(self):
        if getattr(self, "ptr", 0) and not sys.is_finalizing():
            ctypes.memset(self.ptr, _memory._POISON, self.size)
            _free[self.size].append(self.ptr)


class _Meta(type):
    def __instancecheck__(cls, value):
        return hasattr(type(value), "_is_pinned_memory")


class PinnedMemoryPointer(metaclass=_Meta):
    """A place in pinned memory, with the buffer protocol: `ptr`, `mem`, `size()`."""

    def __new__(cls, mem, offset):
        # Only ctypes gives a class of Python's the buffer protocol before Python 3.12.
        length = mem.size - offset
        fields = {"size": lambda self: length, "_is_pinned_memory": True}
        kind = type("PinnedMemoryPointer", (ctypes.c_uint8 * length,), fields)
        pointer = kind.from_address(mem.ptr + offset)
        pointer.ptr, pointer.mem = mem.ptr + offset, mem
        return pointer


def alloc_pinned_memory(size):
    size = max(512, 1 << (size - 1).bit_length()) if size > 0 else 512
    return PinnedMemoryPointer(PinnedMemory(size), 0)


def _register(address, nbytes):
    if not nbytes or not address:
        raise CUDARuntimeError(1)
    if _overlaps(address, nbytes):
        raise CUDARuntimeError(712)
    _registered[address] = nbytes


def _unregister(address):
    from .. import _queues

    if address not in _registered:
        raise CUDARuntimeError(713)
    if _queues.in_use(address, _registered[address]):
        raise CUDARuntimeError(1, "copies from or to this memory are still queued")
    del _registered[address]

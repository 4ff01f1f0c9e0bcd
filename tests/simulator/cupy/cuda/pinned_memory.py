"""Pinned host memory: what the device copies from and to while the host goes on."""

from __future__ import annotations

import collections
import ctypes
import weakref

from .. import _queues
from .._errors import CUDARuntimeError
from . import memory as _memory

_free = collections.defaultdict(list)  # bytes -> addresses, as CuPy's pool keeps them
_pool = {}  # address -> bytes
_registered = {}  # address -> bytes: the caller's own memory


def _ranges():
    return [*_pool.items(), *_registered.items()]


def _pinned(address, nbytes):
    """Whether the device can access these bytes directly."""
    return any(
        first <= address and address + nbytes <= first + size
        for first, size in _ranges()
    )


def empty(nbytes):
    """Return a buffer, which goes to the next one who asks, whatever is under way."""
    size = max(nbytes, 1)
    address = _free[size].pop() if _free[size] else _memory._allocate(size)
    _pool[address] = size
    buffer = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(buffer, _give, address, size).atexit = False
    return buffer


def _give(address, size):
    ctypes.memset(address, _memory._POISON, size)
    _free[size].append(address)


def _register(address, nbytes):
    if not nbytes or not address:
        raise CUDARuntimeError(1)
    if any(
        first < address + nbytes and address < first + size for first, size in _ranges()
    ):
        raise CUDARuntimeError(712)
    _registered[address] = nbytes


def _unregister(address):
    if address not in _registered:
        raise CUDARuntimeError(713)
    if _queues.in_use(address, _registered[address]):
        raise CUDARuntimeError(1, "copies from or to this memory are still queued")
    del _registered[address]

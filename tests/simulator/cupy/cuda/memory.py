"""Memory of the simulated devices: host memory, poisoned where it is unwritten.

A freed block is given to the next array of its size and stream at once, as by CuPy's
pool: another stream that still uses it finds poison or other values. Like CuPy's, the
pool knows a stream by its address, which may be that of one that is gone.
"""

from __future__ import annotations

import collections
import ctypes
import sys
import threading

from .. import _queues
from .._errors import CUDARuntimeError
from .device import Device, get_device_id
from .stream import _queue_of

# Every byte; NaN in all floating dtypes, -1 in all signed integers.
_POISON = 0xFF
_ALIGNMENT = 512
_MANY = 256 << 20

_libc = ctypes.CDLL(None)
_libc.posix_memalign.argtypes = [
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_size_t,
]
_libc.free.argtypes = [ctypes.c_void_p]


class _Block:
    """Free memory, and the queue that used it last."""

    def __init__(self, address, nbytes, queue):
        self.address, self._nbytes, self._queue = address, nbytes, queue
        self._mine = True

    def poison(self):
        # To free memory changes nothing: a queue that has it now may write to it.
        if self._mine:
            ctypes.memset(self.address, _POISON, self._nbytes)

    def take(self, queue):
        """Let a queue have it; return the address."""
        if self._queue is not queue:
            self._mine = False
            new = _Block(self.address, self._nbytes, queue)
            queue.put_quietly(new.poison)
        return self.address


_lock = threading.RLock()
_live = {}  # device memory in use: address -> (bytes, device)
_free = collections.defaultdict(list)  # (device, pool, bytes) -> _Block


def _allocate(nbytes):
    """Return the address of memory; its end is exact, so that ASan sees overruns."""
    address = ctypes.c_void_p()
    if _libc.posix_memalign(ctypes.byref(address), _ALIGNMENT, nbytes):
        raise CUDARuntimeError(2)
    ctypes.memset(address.value, _POISON, nbytes)
    return address.value


def _take(nbytes, queue):
    if _free_bytes() > _MANY:
        _free_all()
    with _lock:
        free = _free[queue.device, queue.pool, nbytes]
        block = free.pop() if free else None
    address = block.take(queue) if block else _allocate(nbytes)
    with _lock:
        _live[address] = nbytes, queue.device
    return address


def _give(address, nbytes, queue):
    block = _Block(address, nbytes, queue)
    # In stream order: work that was queued before may still use it.
    queue.put_quietly(block.poison)
    with _lock:
        del _live[address]
        _free[queue.device, queue.pool, nbytes].append(block)


def _free_all():
    _queues.synchronize_device()
    with _lock:
        for blocks in _free.values():
            while blocks:
                _libc.free(blocks.pop().address)
        _free.clear()


def _used_bytes(device):
    with _lock:
        return sum(nbytes for nbytes, where in _live.values() if where == device)


def _free_bytes():
    with _lock:
        return sum(nbytes * len(each) for (*_, nbytes), each in _free.items())


def _on_device(address):
    """Whether an address is one of device memory."""
    with _lock:
        return any(
            first <= address < first + nbytes for first, (nbytes, _) in _live.items()
        )


class BaseMemory:
    """Memory: `ptr`, `size` in bytes, `device_id`."""

    def __init__(self):
        self.ptr, self.size, self.device_id = 0, 0, get_device_id()

    @property
    def device(self):
        return Device(self.device_id)


class Memory(BaseMemory):
    """Memory of the current device, given back in the order of the current stream."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self._queue = _queue_of()
        if size:
            self.ptr = _take(size, self._queue)

    def __del__(self):
        if getattr(self, "ptr", 0) and not sys.is_finalizing():
            _give(self.ptr, self.size, self._queue)


class UnownedMemory(BaseMemory):
    """Memory of another object, which is kept alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        super().__init__()
        self.ptr, self.size, self._owner = ptr, size, owner
        if device_id != -1:
            self.device_id = device_id


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device_id(self):
        return self.mem.device_id


class MemoryPool:
    """The pool of all devices."""

    def used_bytes(self):
        return _used_bytes(get_device_id())

    def free_all_blocks(self, stream=None):
        """Free unused memory; wait for all devices."""
        _free_all()


_pool = MemoryPool()

"""Tables on the device: what a launch over many arrays works on.

A launch costs microseconds, as much as moving a megabyte. So one launch works on all
the hundreds of small gradients of a model: it reads their addresses from a table, and
each block of it works on one chunk of one array. The idea is that of multi-tensor
launches in NVIDIA's Apex.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from hpcaccum.device import kernels
from hpcaccum.device.arrays import cupy, current_device, current_stream

T = TypeVar("T")

# A dtype's number in a table (kernels/common.cuh).
KINDS = {dtype: number for number, dtype in enumerate(kernels.SUFFIXES)}
# So many tables are kept: the same arrays are used every step, or a few sets alternate.
RECENT = 8

# Elements that one block works on: what its threads load at once, and fewer where whole
# multiprocessors would have no work. A block moves _LEAST in one pass. (An H100 packs
# 1 GiB at 0.96 of a copy's rate so, and at 0.90 with blocks of 16384.)
_MOST, _LEAST = 4096, 1024
# cudaStreamPerThread of the CUDA runtime.
_PER_THREAD = 2


def upload(rows: ArrayLike, dtype: Any = np.int64) -> Any:
    """Copy a table to the device, by the current stream; the host does not wait."""
    return cupy().asarray(np.array(rows, dtype))


class Chunks(NamedTuple):
    """The pieces of arrays that blocks work on; kernels take it as two arguments.

    `rows` is on the device; it has a row of 2 int64 per chunk: number of the array,
    first element. At least one, which may be empty: a launch needs a block. A chunk has
    at most `length` elements.
    """

    rows: Any
    length: np.int64

    @property
    def blocks(self) -> int:
        """Number of chunks."""
        return len(self.rows)


def chunked(sizes: Sequence[int], most: int = _MOST) -> Chunks:
    """Divide arrays of these sizes, so that all multiprocessors have work."""
    elements = sum(sizes)
    share = -(-elements // kernels.blocks(elements))
    length = max(_LEAST, min(most, -(-share // _LEAST) * _LEAST))
    counts = -(-np.array(sizes, np.int64) // length)
    array = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(array)) - (counts.cumsum() - counts)[array]
    rows = np.column_stack([array, number * length])
    return Chunks(upload(rows if len(rows) else [(0, 0)]), np.int64(length))


class RecentTables(Generic[T]):
    """The recent results of a function that copies tables to the device.

    A table belongs to the stream that copied it, which lives as long. Another stream
    could read it too early, or after its memory was reused. Several threads may call.
    The function must not refer to what holds this object: tables would stay until a
    garbage collection.
    """

    def __init__(self, make: Callable[..., T], most: int = RECENT) -> None:
        self._of_stream = functools.lru_cache(most)(lambda stream, *key: make(*key))

    def __call__(self, *key: Hashable) -> T:
        """Return the result for a key on the current stream."""
        stream = current_stream()
        # The stream itself, not its address: CUDA gives the address of a stream that is
        # gone to the next one, even before the work of the first is complete. And the
        # default streams of all devices, and of all threads, have the same addresses.
        thread = threading.get_ident() if stream.ptr == _PER_THREAD else 0
        return self._of_stream((current_device(), stream, thread), *key)

    def clear(self) -> None:
        """Drop all tables."""
        self._of_stream.cache_clear()

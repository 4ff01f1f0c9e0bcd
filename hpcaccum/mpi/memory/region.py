"""Memory of one rank, in a window, which all ranks read and write one-sidedly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.mpi.job.runtime import MPI
from hpcaccum.mpi.memory.windows import FREED, allocate, free
from hpcaccum.mpi.talk.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

# Bytes that one MPI call moves at most: counts are of 32 bits in MPI-3 libraries.
_CHUNK_BYTES = 1 << 30
# Bytes up to which an addition is not announced: one or two calls of MPI move them.
_SHORT = 1 << 15
# Announcements, which MPI may read after a call.
_IDLE, _ADDING = np.zeros(1, np.int64), np.ones(1, np.int64)


class Region:
    """Memory of the rank ``root``, all zeros at first. Collective.

    What `accumulate` adds on another node moves when the root calls MPI, and little at
    a time. So ranks announce long additions, each in a word of its own on the root,
    whose agent, a thread of it, naps only briefly until they are complete.

    This rank also reaches it by plain loads and stores if it is `direct`, because it
    shares a node with all others or is the root.
    """

    def __init__(self, group: Group, root: int, nbytes: int) -> None:
        self._root, self._rank = root, group.rank
        nbytes = max(1, -(-nbytes // 64)) * 64
        self.direct = group.single_node or group.rank == root
        self.nbytes_here = nbytes if group.rank == root else 0
        # Where the words of the ranks begin.
        self._words = nbytes
        self._window: Any = allocate(group, root, nbytes + 8 * group.size, 1)
        self._memory = np.empty(0, np.uint8)
        if self.direct:
            memory = self._window.tomemory()
            if group.single_node:
                memory = self._window.Shared_query(root)[0]
            # The array does not keep the window's memory alive.
            self._memory = np.frombuffer(memory, np.uint8)
        # The thread reads them again and again: NumPy would take ten times as long.
        self._announced: memoryview = self._memory[self._words :].data
        self._none = bytes(self._announced.nbytes)
        self._end_arrivals: Callable[[], None] | None = None
        if group.rank == root and not group.single_node:
            # Whether a rank of another node adds a long vector.
            self._end_arrivals = group.progress.expect(
                lambda: bytes(self._announced) != self._none
            )

    def view(self, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements as a view, which must not outlive it; only if `direct`."""
        return self._memory[offset : offset + count * dtype.itemsize].view(dtype)

    def sync(self) -> None:
        """Order this rank's plain loads and stores with Put and Get of other ranks."""
        self._window.Sync()

    def put(self, offset: int, data: Array) -> None:
        """Write a contiguous vector; complete on return."""
        self._move(self._window.Put, offset, data, MPI.BYTE)

    def get(self, offset: int, out: Array) -> None:
        """Read into a contiguous vector."""
        self._move(self._window.Get, offset, out, MPI.BYTE)

    def accumulate(self, offset: int, data: Array) -> None:
        """Add a contiguous vector of float32 or float64, each element atomically."""
        kind = MPI.FLOAT if data.dtype.itemsize == 4 else MPI.DOUBLE
        announced = not self.direct and data.nbytes > _SHORT
        try:
            if announced:
                self._announce(_ADDING)
            self._move(self._window.Accumulate, offset, data, kind, MPI.SUM)
        finally:
            if announced:
                # Without a flush, which takes a round trip: the next one completes it.
                self._announce(_IDLE)

    def _move(
        self,
        call: Callable[..., None],
        offset: int,
        data: Array,
        kind: mpi4py_MPI.Datatype,
        *operation: mpi4py_MPI.Op,
    ) -> None:
        step = _CHUNK_BYTES // data.dtype.itemsize
        try:
            for start in range(0, data.size, step):
                piece = data[start : start + step]
                place = offset + start * data.dtype.itemsize
                target = place, piece.nbytes // kind.Get_size(), kind
                call([piece, kind], self._root, target, *operation)
        finally:
            # Also after an exception: MPI must not read memory that is freed.
            self._window.Flush(self._root)

    def _announce(self, word: Array) -> None:
        target = (self._words + 8 * self._rank, 1, MPI.LONG)
        self._window.Accumulate([word, MPI.LONG], self._root, target, MPI.REPLACE)

    def free(self) -> None:
        """Free the window. Collective."""
        if self._end_arrivals is not None:
            self._end_arrivals()
        self._announced = memoryview(b"")
        self._memory = np.empty(0, np.uint8)
        free(self._window)
        self._window = FREED

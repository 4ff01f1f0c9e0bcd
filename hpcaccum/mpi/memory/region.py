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


class Region:
    """Memory of the rank ``root``, all zeros at first. Collective.

    What `accumulate` adds on another node moves when the root calls MPI, and little at
    a time.

    This rank also reaches it by plain loads and stores if it is `direct`, because it
    shares a node with all others or is the root.
    """

    def __init__(self, group: Group, root: int, nbytes: int) -> None:
        self._root = root
        nbytes = max(1, -(-nbytes // 64)) * 64
        self.direct = group.single_node or group.rank == root
        self.nbytes_here = nbytes if group.rank == root else 0
        self._window: Any = allocate(group, root, nbytes, 1)
        self._memory = np.empty(0, np.uint8)
        if self.direct:
            memory = self._window.tomemory()
            if group.single_node:
                memory = self._window.Shared_query(root)[0]
            # The array does not keep the window's memory alive.
            self._memory = np.frombuffer(memory, np.uint8)

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
        self._move(self._window.Accumulate, offset, data, kind, MPI.SUM)

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

    def free(self) -> None:
        """Free the window. Collective."""
        self._memory = np.empty(0, np.uint8)
        free(self._window)
        self._window = FREED

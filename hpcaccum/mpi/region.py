"""Memory of one rank or of each, which other ranks read and write.

Where the ranks share a node it is mapped, and reached by plain loads and stores
(`node_memory.NodeMemory`). Otherwise it is a window, reached by Put, Get and
Accumulate.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi.node_memory import NodeMemory
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.windows import FREED, allocate, without_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.mpi.group import Group

Array = np.ndarray[Any, Any]

# Bytes that one MPI call moves at most: counts are of 32 bits in MPI-3 libraries.
_CHUNK_BYTES = 1 << 30


class Region:
    """Memory that some ranks write and others read, all zeros at first. Collective.

    It has one part for each rank with ``spread``, and one part of the root without.
    Where all ranks share a node, the parts are in `NodeMemory`. Otherwise all parts are
    in a window on the root.

    Args:
        group: The ranks.
        root: The rank with the window, or with the only part.
        nbytes: Size of a part.
        spread: Whether each rank has a part.
        window: Whether to use a window on one node too, for `accumulate`.

    Attributes:
        mapped: Whether all ranks have all parts mapped. `put`, `get` and `accumulate`
            are for regions that are not mapped. Views of a mapped region outlive it;
            those of a window must not.
        direct: Whether this rank reaches all parts by plain loads and stores.
        nbytes_here: Bytes of the region in this rank's memory.

    Raises:
        InvalidArgumentError: On every rank, if there is too little memory.
        RuntimeError: On every rank, if MPI can make no more windows.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        nbytes: int,
        *,
        spread: bool,
        window: bool = False,
    ) -> None:
        self._root = root
        self._window: Any = None
        self._nbytes = nbytes = max(1, -(-nbytes // 64)) * 64
        owners = list(range(group.size)) if spread else [root]
        self.mapped = group.single_node and not window
        self.direct = group.single_node or group.rank == root
        if self.mapped:
            sizes = [nbytes * (rank in owners) for rank in range(group.size)]
            parts = NodeMemory(group, sizes).parts
            self._memory = [parts[rank] for rank in owners]
            self.nbytes_here = sizes[group.rank]
            return
        whole = nbytes * len(owners)
        self.nbytes_here = whole if group.rank == root else 0
        self._window = allocate(group, root, whole, 1)
        self._memory = self._map(group, len(owners)) if self.direct else []

    def _map(self, group: Group, parts: int) -> list[Array]:
        """Return each part as bytes of this rank's address space."""
        memory = self._window.tomemory()
        if group.single_node:
            memory = self._window.Shared_query(self._root)[0]
        # The array does not keep the window's memory alive.
        return np.split(np.frombuffer(memory, np.uint8), parts)

    def view(self, part: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements of a part as a view. Only if `direct`."""
        memory = self._memory[part][offset : offset + count * dtype.itemsize]
        return memory.view(dtype)

    def sync(self) -> None:
        """Order this rank's plain loads and stores with Put and Get of other ranks.

        A no-op for mapped memory, which words order: see `AtomicWords`.
        """
        if self._window is not None:
            self._window.Sync()

    def put(self, part: int, offset: int, data: Array) -> None:
        """Write a contiguous vector to a part; complete on return."""
        try:
            for start, piece in _pieces(data):
                target = self._target(part, offset + start, piece)
                self._window.Put([piece, MPI.BYTE], self._root, target)
        finally:
            # Also after an exception: MPI must not read memory that is freed.
            self._window.Flush(self._root)

    def accumulate(
        self, part: int, offset: int, data: Array, added: list[None] | None = None
    ) -> None:
        """Add a contiguous float32 or float64 vector; each element is added atomically.

        Args:
            part: The part to add to.
            offset: Byte of the part where the vector begins.
            data: The vector; MPI reads it until this returns.
            added: Gets an entry for each piece that was added. After an exception, a
                second call with the same list adds the remaining pieces.
        """
        added = [] if added is None else added
        kind = MPI.FLOAT if data.dtype.itemsize == 4 else MPI.DOUBLE
        try:
            for start, piece in list(_pieces(data))[len(added) :]:
                target = self._target(part, offset + start, piece, kind)
                add = functools.partial(
                    self._window.Accumulate, [piece, kind], self._root, target, MPI.SUM
                )
                without_signals(add, functools.partial(added.append, None))
        finally:
            self._window.Flush(self._root)

    def get(self, part: int, offset: int, out: Array) -> None:
        """Read a part into a contiguous vector."""
        try:
            for start, piece in _pieces(out):
                target = self._target(part, offset + start, piece)
                self._window.Get([piece, MPI.BYTE], self._root, target)
        finally:
            self._window.Flush(self._root)

    def _target(
        self, part: int, offset: int, piece: Array, kind: Any = None
    ) -> tuple[int, int, Any]:
        where = part * self._nbytes + offset
        if kind is None:
            return (where, piece.nbytes, MPI.BYTE)
        return (where, piece.size, kind)

    def free(self) -> None:
        """Free the window, or drop the mapped memory. Collective."""
        self._memory = []
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = FREED


def _pieces(data: Array) -> Iterator[tuple[int, Array]]:
    """Yield pieces of a vector that one MPI call can move, with their byte offsets."""
    step = _CHUNK_BYTES // data.dtype.itemsize
    for start in range(0, data.size, step):
        yield start * data.dtype.itemsize, data[start : start + step]

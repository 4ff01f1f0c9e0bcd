"""Every one-sided MPI call of the project.

`Cells` are 64-bit words on one rank that all ranks read and change atomically.
`Region` is memory of each rank, or of one rank for all, that others reach: by plain
loads and stores where the ranks share a node, by Put and Get where they do not.

All windows come from MPI_Win_allocate and are locked once, with Lock_all, when they
are made: windows over memory of our own, and a lock around each operation, both make
MPICH wait for a target that computes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.group import Group

Array = np.ndarray[Any, Any]

_SHM = "/dev/shm"
# One MPI call moves at most this much: counts are 32-bit in MPI-3 libraries.
_CHUNK_BYTES = 1 << 30


class Cells:
    """64-bit integers in the memory of the rank ``host``. Collective.

    All start at 0. `add` and `swap` are atomic among all ranks; the other writes are
    for words that only one rank writes at a time. Calls may come from several threads
    at once.

    Where the ranks share a node, reads and writes are plain loads and stores between
    two Win_sync, which costs a tenth of an RMA call, and a rank that polls does not
    slow down those that work.
    """

    def __init__(self, group: Group, host: int, count: int) -> None:
        self.host = host
        self._local = threading.local()
        here = count * 8 if group.rank == host else 0
        check_shared_memory(group, here)
        allocate = MPI.Win.Allocate_shared if group.single_node else MPI.Win.Allocate
        self._window = allocate(here, 8, comm=group.comm)
        # The words themselves, where this rank may load and store them.
        self._words: memoryview | None = None
        if group.single_node:
            memory: Any = self._window.Shared_query(host)[0]
            self._words = memoryview(memory).cast("B").cast("q")
        if here:
            _array(self._window.tomemory(), np.int64)[:] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._window.Sync()
        # No rank may reach the memory before it is zero.
        group.comm.Barrier()

    @property
    def direct(self) -> bool:
        """Whether reading costs next to nothing."""
        return self._words is not None

    def _scratch(self) -> tuple[Array, Array, Array]:
        # One set a thread: a server thread and the user's own use the same cells.
        try:
            return self._local.scratch  # type: ignore[no-any-return]
        except AttributeError:
            self._local.scratch = tuple(np.zeros(1, np.int64) for _ in range(3))
            self._local.posted = []
            return self._local.scratch  # type: ignore[no-any-return]

    def read(self, index: int) -> int:
        """Return one word."""
        if self._words is not None:
            self._window.Sync()
            return self._words[index]
        return self._fetch(index, 0, MPI.NO_OP)

    def add(self, index: int, value: int) -> int:
        """Add to one word; return what it was before."""
        return self._fetch(index, value, MPI.SUM)

    def _fetch(self, index: int, value: int, operation: Any) -> int:
        operand, result, _ = self._scratch()
        operand[0] = value
        self._window.Fetch_and_op(operand, result, self.host, index, operation)
        self._complete()
        return int(result[0])

    def swap(self, index: int, expected: int, new: int) -> int:
        """Set a word to ``new`` if it is ``expected``; return what it was before."""
        origin, result, compare = self._scratch()
        origin[0], compare[0] = new, expected
        self._window.Compare_and_swap(origin, compare, result, self.host, index)
        self._complete()
        return int(result[0])

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        if self._words is not None:
            self._window.Sync()
            return self._words[index : index + count].tolist()
        result = np.empty(count, np.int64)
        self._window.Get_accumulate(
            [None, 0, MPI.LONG], result, self.host, (index, count, MPI.LONG), MPI.NO_OP
        )
        self._window.Flush(self.host)
        return result.tolist()  # type: ignore[no-any-return]

    def write(self, index: int, value: int) -> None:
        """Set one word; it is there on return."""
        self.write_range(index, [value])

    def write_range(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; they are there on return."""
        self.post(index, values)
        self.flush()

    def post(self, index: int, values: Sequence[int]) -> None:
        """Set several words, some time before the next call that waits returns."""
        if self._words is None:
            self._send(index, values, MPI.REPLACE)
            return
        self._window.Sync()
        for place, value in enumerate(values, index):
            self._words[place] = value
        self._window.Sync()

    def count(self, index: int) -> None:
        """Add 1 to a word of this rank's own, as `post` sets one."""
        if self._words is None:
            self._send(index, [1], MPI.SUM)
        else:
            self._words[index] += 1

    def _send(self, index: int, values: Sequence[int], operation: Any) -> None:
        origin = np.array(values, np.int64)
        self._scratch()
        # MPI reads it until the next flush.
        self._local.posted.append(origin)
        target = (index, origin.size, MPI.LONG)
        self._window.Accumulate(origin, self.host, target, operation)

    def flush(self) -> None:
        """Wait until what was posted is there."""
        if self._words is None:
            self._scratch()
            self._complete()

    def _complete(self) -> None:
        self._window.Flush(self.host)
        self._local.posted.clear()

    def free(self) -> None:
        """Free the window. Collective."""
        self._words = None
        self._window.Unlock_all()
        self._window.Free()


class Region:
    """Memory that ranks write and others read. Collective.

    With ``spread`` each rank owns ``nbytes``, in its own memory where all ranks share
    a node, else in the host's (and then reached by Put and Get). Without, there is one
    part only, the host's.

    Attributes:
        direct: Whether this rank reaches all parts by plain loads and stores.
    """

    def __init__(self, group: Group, host: int, nbytes: int, *, spread: bool) -> None:
        self._group, self._host = group, host
        self._nbytes = nbytes = max(1, -(-nbytes // 64)) * 64
        self._parts = group.size if spread else 1
        self._local_parts = group.single_node and spread
        hosted = nbytes * self._parts if group.rank == host else 0
        here = nbytes if self._local_parts else hosted
        check_shared_memory(group, here)
        allocate = MPI.Win.Allocate_shared if group.single_node else MPI.Win.Allocate
        info = MPI.Info.Create()
        # Each part may lie near the rank that owns it.
        info.Set("alloc_shared_noncontig", "true")
        self._window = allocate(here, 1, info=info, comm=group.comm)
        info.Free()
        self.direct = group.single_node or group.rank == host
        self._memory = self._map() if self.direct else []
        if here:
            _array(self._window.tomemory(), np.uint8)[:] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sync()
        group.comm.Barrier()

    def _map(self) -> list[Array]:
        """Return each part as bytes of this rank's address space."""
        if self._local_parts:
            return [
                _array(self._window.Shared_query(rank)[0], np.uint8)
                for rank in range(self._parts)
            ]
        if self._group.single_node:
            memory = self._window.Shared_query(self._host)[0]
        else:
            memory = self._window.tomemory()
        whole = _array(memory, np.uint8)
        return [
            whole[part * self._nbytes : (part + 1) * self._nbytes]
            for part in range(self._parts)
        ]

    @property
    def nbytes_here(self) -> int:
        """Bytes that this rank's memory holds."""
        if self._local_parts:
            return self._nbytes
        return self._nbytes * self._parts if self._group.rank == self._host else 0

    def view(self, part: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements of a part where they lie. Only if `direct`."""
        memory = self._memory[part][offset : offset + count * dtype.itemsize]
        return memory.view(dtype)

    def sync(self) -> None:
        """Order this rank's plain loads and stores with those of others."""
        self._window.Sync()

    def put(self, part: int, offset: int, data: Array) -> None:
        """Write a contiguous vector into a part; it is there on return."""
        for start, piece in _pieces(data):
            target = self._target(part, offset + start, piece)
            self._window.Put([piece, MPI.BYTE], self._host, target)
        self._window.Flush(self._host)

    def accumulate(self, part: int, offset: int, data: Array) -> None:
        """Add a contiguous float32 or float64 vector, element by element atomic."""
        kind = MPI.FLOAT if data.dtype.itemsize == 4 else MPI.DOUBLE
        for start, piece in _pieces(data):
            target = self._target(part, offset + start, piece, kind)
            self._window.Accumulate([piece, kind], self._host, target, MPI.SUM)
        self._window.Flush(self._host)

    def get(self, part: int, offset: int, out: Array) -> None:
        """Read a part into a contiguous vector."""
        for start, piece in _pieces(out):
            target = self._target(part, offset + start, piece)
            self._window.Get([piece, MPI.BYTE], self._host, target)
        self._window.Flush(self._host)

    def _target(
        self, part: int, offset: int, piece: Array, kind: Any = None
    ) -> tuple[int, int, Any]:
        where = part * self._nbytes + offset
        if kind is None:
            return (where, piece.nbytes, MPI.BYTE)
        return (where, piece.size, kind)

    def free(self) -> None:
        """Free the window; views of it are invalid from then on. Collective."""
        self._memory = []
        self._window.Unlock_all()
        self._window.Free()


def _array(memory: Any, dtype: Any) -> Array:
    """Return MPI's memory as a vector, which does not keep it alive."""
    return np.frombuffer(memory, dtype)


def _pieces(data: Array) -> Iterator[tuple[int, Array]]:
    """Cut a vector into pieces that one MPI call can move, with their byte offsets."""
    step = _CHUNK_BYTES // data.dtype.itemsize
    for start in range(0, data.size, step):
        yield start * data.dtype.itemsize, data[start : start + step]


def check_shared_memory(group: Group, nbytes: int) -> None:
    """Refuse a window for which the node has no room. Collective.

    MPICH allocates without a word and the first touch kills the rank with SIGBUS.

    Raises:
        InvalidArgumentError: On every rank.
    """
    wanted = group.node.allreduce(nbytes)

    def enough() -> dict[str, object]:
        with contextlib.suppress(FileNotFoundError):
            state = os.statvfs(_SHM)
            free = state.f_bavail * state.f_frsize
            if wanted > free:
                raise InvalidArgumentError(
                    f"the window needs {wanted / 2**20:.1f} MiB of {_SHM} on this "
                    f"node, {free / 2**20:.1f} MiB are free (containers: --shm-size)"
                )
        return {}

    group.agree("allocating a window", enough)


class NodeMemory:
    """One part a rank and one common part, of ranks that share a node. Collective.

    Plain loads and stores only. The contents are arbitrary, and nobody has touched them
    yet: who touches a page first decides on which socket it lies.

    Args:
        group: Ranks of one node.
        nbytes: Of each rank's part.
        common: Bytes of the common part.

    Attributes:
        parts: The parts as bytes, in rank order.
        common: The common part as bytes.
    """

    def __init__(self, group: Group, nbytes: int, common: int) -> None:
        nbytes = max(1, -(-nbytes // 64)) * 64
        here = nbytes + (common if group.rank == 0 else 0)
        check_shared_memory(group, here)
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")
        self._window = MPI.Win.Allocate_shared(here, 1, info=info, comm=group.comm)
        info.Free()
        memory = [
            _array(self._window.Shared_query(rank)[0], np.uint8)
            for rank in range(group.size)
        ]
        self.parts = [each[:nbytes] for each in memory]
        self.common: Array = memory[0][nbytes : nbytes + common]
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def sync(self) -> None:
        """Order this rank's loads and stores with those of others."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window; views of it are invalid from then on. Collective."""
        self.parts, self.common = [], np.empty(0, np.uint8)
        self._window.Unlock_all()
        self._window.Free()

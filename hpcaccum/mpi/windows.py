"""Every one-sided MPI call of the project.

`AtomicWords` are 64-bit words on one rank that all ranks read and change atomically.
`Region` is memory of each rank, or of one rank for all, that others reach: by plain
loads and stores where the ranks share a node (`node_memory.NodeMemory`), by Put and Get
where they do not.

All windows come from MPI_Win_allocate and are locked once, with Lock_all, when they
are made: windows over memory of our own, and a lock around each operation, both make
MPICH wait for a target that computes.
"""

from __future__ import annotations

import collections
import functools
import operator
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.errors import FreedError
from hpcaccum.mpi.node_memory import NodeMemory, check_room, explained, pieces
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.shutdown import count_open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpcaccum.mpi.group import Group

Array = np.ndarray[Any, Any]

# One MPI call moves at most this much: counts are 32-bit in MPI-3 libraries.
_CHUNK_BYTES = 1 << 30
# No word has this value.
_NEVER = -(1 << 63)


class Attempt:
    """One atomic change of a word, whose outcome an exception does not hide.

    A signal handler may raise after MPI has changed the word and before Python has got
    the result. MPI leaves the result in this memory, where it can be read afterwards,
    once `AtomicWords.settle` has returned.

    Attributes:
        origin, compare, result: One word each: the operand, the value that was expected
            and the value that was there before.
    """

    __slots__ = ("compare", "origin", "result")

    def __init__(self) -> None:
        self.origin, self.compare, self.result = np.full((3, 1), _NEVER, np.int64)

    def reset(self) -> None:
        """Forget the outcome."""
        self.result[0] = _NEVER

    @property
    def added(self) -> bool:
        """Whether `fetch_add` was carried out since the last reset."""
        return bool(self.result[0] != _NEVER)

    @property
    def swapped(self) -> bool:
        """Whether `compare_and_swap` changed the word since the last reset."""
        return self.added and bool(self.result[0] == self.compare[0])


class _Scratch(threading.local):
    """One set a thread: a server thread and the user's own use the same cells."""

    def __init__(self) -> None:
        self.attempt = Attempt()
        # What MPI reads until the next flush.
        self.posted: list[Array] = []


class _Freed:
    """Stands for a window that is gone: MPI may end the job for its use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FreedError("its windows were freed")


_FREED: Any = _Freed()


class AtomicWords:
    """64-bit integers in the memory of the rank ``root``. Collective.

    All start at 0. `fetch_add` and `compare_and_swap` are atomic among all ranks; the
    other writes are for words that only one rank writes at a time. Calls may come from
    several threads at once.

    Where the ranks share a node, reads and writes are plain loads and stores beside a
    Win_sync, which costs a tenth of an RMA call, and a rank that polls does not slow
    down those that work.

    There, words also order the memory that all ranks have mapped (`NodeMemory`). MPI
    promises an order by Win_sync for the memory of its window, but in both libraries
    it is a full barrier of the processor, which knows no windows. `store` and `write`
    have one before the store: when another rank sees the word, all is done that this
    rank did before. `read` and `read_range` have one after the load: what this rank
    reads then is at least as new as the word. A rank that reads memory first and then
    a word, to learn whether the memory was valid, needs `sync` in between.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self.root = root
        self._local = _Scratch()
        self._window = _allocate(group, root, count * 8, 8)
        # The words themselves, where this rank may load and store them.
        self._words: memoryview | None = None
        if group.single_node:
            memory: Any = self._window.Shared_query(root)[0]
            self._words = memoryview(memory).cast("B").cast("q")

    @property
    def direct(self) -> bool:
        """Whether reading costs next to nothing."""
        return self._words is not None

    def read(self, index: int) -> int:
        """Return one word."""
        if self._words is not None:
            word = self._words[index]
            self._window.Sync()
            return word
        return self._fetch(index, 0, MPI.NO_OP, self._local.attempt)

    def fetch_add(self, index: int, value: int, attempt: Attempt | None = None) -> int:
        """Add to one word; return what it was before."""
        return self._fetch(index, value, MPI.SUM, attempt or self._local.attempt)

    def _fetch(self, index: int, value: int, operation: Any, attempt: Attempt) -> int:
        result = attempt.result
        result[0], attempt.origin[0] = _NEVER, value
        self._window.Fetch_and_op(attempt.origin, result, self.root, index, operation)
        self._complete()
        return int(result[0])

    def compare_and_swap(
        self, index: int, expected: int, new: int, attempt: Attempt | None = None
    ) -> int:
        """Set a word to ``new`` if it is ``expected``; return what it was before."""
        attempt = attempt or self._local.attempt
        origin, compare, result = attempt.origin, attempt.compare, attempt.result
        # In this order: no earlier outcome may be taken for that of this swap.
        result[0] = _NEVER
        origin[0], compare[0] = new, expected
        self._window.Compare_and_swap(origin, compare, result, self.root, index)
        self._complete()
        return int(result[0])

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        if self._words is not None:
            words = self._words[index : index + count].tolist()
            self._window.Sync()
            return words
        result = np.empty(count, np.int64)
        target = (index, count, MPI.LONG)
        try:
            self._window.Get_accumulate(
                [None, 0, MPI.LONG], result, self.root, target, MPI.NO_OP
            )
        finally:
            # Also after an exception: MPI must not write into memory that is freed.
            self._window.Flush(self.root)
        return result.tolist()  # type: ignore[no-any-return]

    def write(self, index: int, value: int) -> None:
        """Set one word; it is there on return."""
        self.write_range(index, [value])

    def write_range(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; they are there on return."""
        self.store(index, values)
        self.flush()

    def store(self, index: int, values: Sequence[int]) -> None:
        """Set several words, some time before the next call that waits returns."""
        if self._words is None:
            self._send(index, values)
            return
        self._window.Sync()
        for place, value in enumerate(values, index):
            self._words[place] = value
        self._window.Sync()

    def store_unordered(self, index: int, value: int) -> None:
        """Set a word that only this rank writes, as `store` does, but in no order."""
        if self._words is None:
            self._send(index, [value])
        else:
            self._words[index] = value

    def _send(self, index: int, values: Sequence[int]) -> None:
        origin = np.array(values, np.int64)
        self._local.posted.append(origin)
        target = (index, origin.size, MPI.LONG)
        self._window.Accumulate(origin, self.root, target, MPI.REPLACE)

    def sync(self) -> None:
        """Order this rank's loads and stores before it with those after it."""
        self._window.Sync()

    def flush(self) -> None:
        """Wait until what was posted is there."""
        if self._words is None:
            self._complete()

    def settle(self) -> None:
        """Wait until a change that an exception interrupted is done, or surely not."""
        self._complete()

    def _complete(self) -> None:
        self._window.Flush(self.root)
        self._local.posted.clear()

    def free(self) -> None:
        """Free the window. Collective."""
        self._words = None
        self._window.Unlock_all()
        self._window.Free()
        self._window = _FREED


class Region:
    """Memory that ranks write and others read, 0 at first. Collective.

    With ``spread`` each rank owns ``nbytes``. Without, there is one part only, the
    host's. Where all ranks share a node it is `NodeMemory`. Else all parts are in a
    window on the host, and others reach them by Put, Get and Accumulate.

    Args:
        group: The ranks.
        host: The rank with the window, or with the only part.
        nbytes: Of a part.
        spread: Whether each rank has one.
        window: Whether it is a window also on one node, for `accumulate`.

    Attributes:
        mapped: Whether all ranks have all parts mapped. `put`, `get` and `accumulate`
            are for where they have not. Views then outlive the region; those of a
            window must not.
        direct: Whether this rank reaches all parts by plain loads and stores.
        nbytes_here: Bytes that this rank's memory holds.
    """

    def __init__(
        self,
        group: Group,
        host: int,
        nbytes: int,
        *,
        spread: bool,
        window: bool = False,
    ) -> None:
        self._host = host
        self._window: Any = None
        self._nbytes = nbytes = max(1, -(-nbytes // 64)) * 64
        owners = list(range(group.size)) if spread else [host]
        self.mapped = group.single_node and not window
        self.direct = group.single_node or group.rank == host
        if self.mapped:
            sizes = [nbytes * (rank in owners) for rank in range(group.size)]
            parts = NodeMemory(group, sizes).parts
            self._memory = [parts[rank] for rank in owners]
            self.nbytes_here = sizes[group.rank]
            return
        whole = nbytes * len(owners)
        self.nbytes_here = whole if group.rank == host else 0
        self._window = _allocate(group, host, whole, 1)
        self._memory = self._map(group, len(owners)) if self.direct else []

    def _map(self, group: Group, parts: int) -> list[Array]:
        """Return each part as bytes of this rank's address space."""
        memory = self._window.tomemory()
        if group.single_node:
            memory = self._window.Shared_query(self._host)[0]
        # It does not keep the window's memory alive.
        return np.split(np.frombuffer(memory, np.uint8), parts)

    def view(self, part: int, offset: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return elements of a part where they lie. Only if `direct`."""
        memory = self._memory[part][offset : offset + count * dtype.itemsize]
        return memory.view(dtype)

    def sync(self) -> None:
        """Order this rank's plain loads and stores with Put and Get of others.

        Nothing to do for mapped memory, which words order: see `AtomicWords`.
        """
        if self._window is not None:
            self._window.Sync()

    def put(self, part: int, offset: int, data: Array) -> None:
        """Write a contiguous vector into a part; it is there on return."""
        try:
            for start, piece in _pieces(data):
                target = self._target(part, offset + start, piece)
                self._window.Put([piece, MPI.BYTE], self._host, target)
        finally:
            # Also after an exception: MPI must not use memory that is freed.
            self._window.Flush(self._host)

    def accumulate(
        self, part: int, offset: int, data: Array, added: list[None] | None = None
    ) -> None:
        """Add a contiguous float32 or float64 vector, element by element atomic.

        Args:
            part: Where to.
            offset: Its first byte there.
            data: The vector; MPI reads it until this returns.
            added: Gets an entry for each piece that was added. After an exception, a
                second call with the same list adds the rest.
        """
        added = [] if added is None else added
        kind = MPI.FLOAT if data.dtype.itemsize == 4 else MPI.DOUBLE
        try:
            for start, piece in list(_pieces(data))[len(added) :]:
                target = self._target(part, offset + start, piece, kind)
                add = functools.partial(
                    self._window.Accumulate, [piece, kind], self._host, target, MPI.SUM
                )
                without_signals(add, functools.partial(added.append, None))
        finally:
            self._window.Flush(self._host)

    def get(self, part: int, offset: int, out: Array) -> None:
        """Read a part into a contiguous vector."""
        try:
            for start, piece in _pieces(out):
                target = self._target(part, offset + start, piece)
                self._window.Get([piece, MPI.BYTE], self._host, target)
        finally:
            self._window.Flush(self._host)

    def _target(
        self, part: int, offset: int, piece: Array, kind: Any = None
    ) -> tuple[int, int, Any]:
        where = part * self._nbytes + offset
        if kind is None:
            return (where, piece.nbytes, MPI.BYTE)
        return (where, piece.size, kind)

    def free(self) -> None:
        """Free the window, or let go of what is mapped. Collective."""
        self._memory = []
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
            self._window = _FREED


def _pieces(data: Array) -> Iterator[tuple[int, Array]]:
    """Cut a vector into pieces that one MPI call can move, with their byte offsets."""
    step = _CHUNK_BYTES // data.dtype.itemsize
    for start in range(0, data.size, step):
        yield start * data.dtype.itemsize, data[start : start + step]


def without_signals(*calls: Callable[[], Any]) -> None:
    """Call functions of C one after the other.

    Python runs signal handlers between its own instructions only, hence not here.
    """
    collections.deque(map(_CALL, calls), 0)


_CALL = operator.methodcaller("__call__")


def _allocate(group: Group, host: int, nbytes: int, unit: int) -> Any:
    """Return a locked window with memory on one rank, of zeros. Collective.

    MPICH dies where it should fail: with SIGSEGV if it has no communicator left for a
    window, and with SIGBUS at the first touch if the node has no room.

    Raises:
        InvalidArgumentError: On every rank, if there is no room.
        RuntimeError: On every rank, if MPI can make no more windows.
    """
    here = nbytes if group.rank == host else 0

    def enough() -> dict[str, object]:
        check_room(here, group.node.size)
        return {}

    group.agree("allocating a window", enough)
    _check_communicators(group)
    allocate = MPI.Win.Allocate_shared if group.single_node else MPI.Win.Allocate
    window: Any = allocate(here, unit, comm=group.comm)
    failure = _clear(window.tomemory(), group.node.size) if here else None
    window.Lock_all(MPI.MODE_NOCHECK)
    window.Sync()
    try:
        # Also so that no rank reaches the memory before it is zero.
        group.raise_together("allocating a window", failure)
    except BaseException:
        window.Unlock_all()
        window.Free()
        raise
    return window


def _check_communicators(group: Group) -> None:
    """Raise on all ranks if MPI can make no communicator; a window needs one."""
    try:
        group.comm.Dup().Free()
    except MPI.Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(
            f"MPI can make no window, {count_open()} objects of hpcaccum are "
            f"open on this rank; free those that are not needed, or let one hold "
            f"several arrays: {reason}"
        ) from None


def _clear(memory: Any, ranks: int) -> Exception | None:
    """Set memory to zeros; return an error if the node has no room for it.

    A system call that cannot write to a page fails, where a store is a SIGBUS.
    """
    whole = memoryview(memory).cast("B")
    try:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            for begin, size in pieces(0, len(whole), ranks):
                zeros.readinto(whole[begin : begin + size])
    except OSError as error:
        return explained(error, len(whole))
    return None

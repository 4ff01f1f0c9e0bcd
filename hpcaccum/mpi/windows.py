"""MPI windows, and atomic words in one.

`AtomicWords` are 64-bit words on one rank that all ranks read and change atomically.
The memory that ranks reach one-sidedly is in `region.Region`.

All windows come from MPI_Win_allocate and are locked once, with Lock_all, when they
are made. A window over existing memory, or a lock around each operation, makes MPICH
wait for a target that computes.
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
from hpcaccum.mpi.node_memory import check_room, explained, pieces
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.shutdown import count_open

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.mpi.group import Group

Array = np.ndarray[Any, Any]

# No word has this value.
_NEVER = -(1 << 63)


class _Freed:
    """Stands for a window that was freed: MPI may end the job for its use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FreedError("its windows were freed")


FREED: Any = _Freed()


class Attempt:
    """One atomic change of a word, whose outcome an exception does not hide.

    A signal handler may raise after MPI has changed the word and before Python has the
    result. MPI writes the result to this object, where it can be read after
    `AtomicWords.settle`.

    Attributes:
        origin, compare, result: One word each: the operand, the expected value, and the
            value before the change.
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
    """Buffers of one thread: a server thread may use the words that the user uses."""

    def __init__(self) -> None:
        self.attempt = Attempt()
        # MPI reads these until the next flush.
        self.posted: list[Array] = []


class AtomicWords:
    """64-bit integers in the memory of the rank ``root``. Collective.

    All are 0 at first. `fetch_add` and `compare_and_swap` are atomic among all ranks;
    the other writes are for words that one rank writes at a time. Several threads may
    make calls at the same time.

    Where the ranks share a node, and on the root, reads and writes are plain loads and
    stores beside a Win_sync. That costs a tenth of an RMA call, and a rank that polls
    does not slow down the others.

    Words also order the memory that ranks of one node have mapped (`NodeMemory`). MPI
    defines the order by Win_sync for the memory of its window only, but in both
    libraries it is a full barrier of the processor. `store` and `write` have one before
    the store: a rank that sees the word sees all earlier stores of this rank. `read`
    and `read_range` have one after the load: later loads of this rank are at least as
    new as the word. A rank that reads memory first, and then a word to find out whether
    the memory was valid, needs `sync` in between. All of this holds for the ranks of
    one node also if the words are on another one.

    Args:
        group: The ranks.
        root: The rank with the window.
        count: Number of words.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self.root = root
        self._local = _Scratch()
        self._window = allocate(group, root, count * 8, 8)
        # The words themselves, where this rank may load and store them.
        self._words = self._map(group)
        self._end_progress = make_progress(group, root, self._window)
        # Called in each read, on the root of a group of several nodes.
        self._progress = None
        if self._words is not None and not group.single_node:
            self._progress = group.progress.look

    def _map(self, group: Group) -> memoryview | None:
        memory: Any = None
        if group.single_node:
            memory = self._window.Shared_query(self.root)[0]
        elif group.rank == self.root and self._window.model == MPI.WIN_UNIFIED:
            memory = self._window.tomemory()
        return None if memory is None else memoryview(memory).cast("B").cast("q")

    @property
    def direct(self) -> bool:
        """Whether a read of this rank is a plain load."""
        return self._words is not None

    def read(self, index: int) -> int:
        """Return one word."""
        if self._words is not None:
            self._look()
            word = self._words[index]
        else:
            word = self._fetch(index, 0, MPI.NO_OP, self._local.attempt)
        self._window.Sync()
        return word

    def fetch_add(self, index: int, value: int, attempt: Attempt | None = None) -> int:
        """Add to one word; return its value before."""
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
        """Set a word to ``new`` if it is ``expected``; return its value before."""
        attempt = attempt or self._local.attempt
        origin, compare, result = attempt.origin, attempt.compare, attempt.result
        # In this order: an earlier outcome must not pass for that of this swap.
        result[0] = _NEVER
        origin[0], compare[0] = new, expected
        self._window.Compare_and_swap(origin, compare, result, self.root, index)
        self._complete()
        return int(result[0])

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        if self._words is not None:
            self._look()
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
            # Also after an exception: MPI must not write to memory that is freed.
            self._window.Flush(self.root)
        self._window.Sync()
        return result.tolist()  # type: ignore[no-any-return]

    def _look(self) -> None:
        """Let other nodes change the words, which this rank may poll."""
        if self._progress is not None:
            self._progress()

    def write(self, index: int, value: int) -> None:
        """Set one word; complete on return."""
        self.write_range(index, [value])

    def write_range(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; complete on return."""
        self.store(index, values)
        self.flush()

    def store(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; complete after the next `flush`."""
        # Also before a word that leaves the node: see the class.
        self._window.Sync()
        if self._words is None:
            self._send(index, values)
            return
        for place, value in enumerate(values, index):
            self._words[place] = value
        self._window.Sync()

    def store_unordered(self, index: int, value: int) -> None:
        """Set a word that only this rank writes, as `store` but without a barrier."""
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
        """Complete all stores at the root."""
        if self._words is None:
            self._complete()

    def settle(self) -> None:
        """Complete a change that an exception interrupted; it may not have begun."""
        self._complete()

    def _complete(self) -> None:
        self._window.Flush(self.root)
        self._local.posted.clear()

    def free(self) -> None:
        """Free the window. Collective."""
        self._end_progress()
        self._words = self._progress = None
        self._window.Unlock_all()
        self._window.Free()
        self._window = FREED


def without_signals(*calls: Callable[[], Any]) -> None:
    """Call functions of C one after the other, with no signal handler in between.

    Python runs signal handlers between bytecode instructions only.
    """
    collections.deque(map(_CALL, calls), 0)


_CALL = operator.methodcaller("__call__")


def allocate(group: Group, root: int, nbytes: int, unit: int) -> Any:
    """Return a locked window with memory on one rank, all zeros. Collective.

    MPICH crashes instead of returning an error: with SIGSEGV if it has no communicator
    left for a window, and with SIGBUS at the first touch if the node has too little
    shared memory. So both are checked first.

    Args:
        group: The ranks.
        root: The rank with the memory.
        nbytes: Its size.
        unit: Displacement unit of the window, in bytes.

    Raises:
        InvalidArgumentError: On every rank, if there is too little memory.
        RuntimeError: On every rank, if MPI can make no more windows.
    """
    local = nbytes if group.rank == root else 0

    def check() -> dict[str, object]:
        check_room(local, group.node.size)
        return {}

    group.agree("allocating a window", check)
    _check_communicators(group)
    make = MPI.Win.Allocate_shared if group.single_node else MPI.Win.Allocate
    window: Any = make(local, unit, comm=group.comm)
    failure = _clear(window.tomemory(), group.node.size) if local else None
    window.Lock_all(MPI.MODE_NOCHECK)
    window.Sync()
    try:
        # This also keeps other ranks from the memory until it is zero.
        group.raise_together("allocating a window", failure)
    except BaseException:
        window.Unlock_all()
        window.Free()
        raise
    return window


def make_progress(group: Group, root: int, window: Any) -> Callable[[], None]:
    """Let other nodes reach a window while its root computes.

    Returns:
        What ends this; to be called before the window is freed.
    """
    # On all ranks: it is collective at first use.
    progress = group.progress
    if group.single_node or group.rank != root:
        return lambda: None
    memory = memoryview(window.tomemory())
    progress.start(memory)
    return functools.partial(progress.stop, memory)


def _check_communicators(group: Group) -> None:
    """Raise on all ranks if MPI can make no communicator, as a window needs one."""
    try:
        group.comm.Dup().Free()
    except MPI.Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(
            f"MPI can make no window, {count_open()} objects of hpcaccum are "
            f"open on this rank; free those that are not needed, or put several arrays "
            f"into one: {reason}"
        ) from None


def _clear(memory: Any, ranks: int) -> Exception | None:
    """Set memory to zeros; return the error if the node has too little of it.

    A system call that cannot write to a page returns an error; a store is a SIGBUS.
    """
    whole = memoryview(memory).cast("B")
    try:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            for begin, size in pieces(0, len(whole), ranks):
                zeros.readinto(whole[begin : begin + size])
    except OSError as error:
        return explained(error, len(whole))
    return None

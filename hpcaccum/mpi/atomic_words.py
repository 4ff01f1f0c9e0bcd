"""Atomic words: 64-bit integers on one rank that all ranks read and change."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.windows import FREED, allocate, make_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.mpi.group import Group

Array = np.ndarray[Any, Any]

# No word has this value.
_NEVER = -(1 << 63)

# Words of a window, at least; and between the beginnings of two parts, two lines of the
# cache, which some processors fetch together.
_WINDOW, _APART = 4096, 16


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


class _Window:
    """A window with words, of which several `AtomicWords` have a part. Collective.

    MPI needs milliseconds and a communicator for a window, of which MPICH has 2,048. No
    word is used twice. So all words of a part are 0 at first, and no rank has to wait
    for the others when it takes or returns a part.

    Args:
        group: The ranks.
        root: The rank with the memory.
        count: Number of words.

    Attributes:
        mpi: The window itself.
        words: The words, where this rank may load and store them; else None.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self._count, self._taken, self._users = count, 0, 0
        self.mpi = allocate(group, root, count * 8, 8)
        self.words = self._map(group, root)
        self._end_progress = make_progress(group, root, self.mpi)

    @classmethod
    def of(cls, group: Group, root: int, count: int) -> _Window:
        """Return a window on a rank with room for ``count`` words. Collective.

        Ranks take and return parts in the same order, so all return the same window.
        """
        name = f"words on rank {root}"
        found = group.named.get(name)
        if not (isinstance(found, cls) and found._has_room(count)):
            found = group.named[name] = cls(group, root, max(count, _WINDOW))
        return found

    def _map(self, group: Group, root: int) -> memoryview | None:
        memory: Any = None
        if group.single_node:
            memory = self.mpi.Shared_query(root)[0]
        elif group.rank == root and self.mpi.model == MPI.WIN_UNIFIED:
            memory = self.mpi.tomemory()
        return None if memory is None else memoryview(memory).cast("B").cast("q")

    def _has_room(self, count: int) -> bool:
        # A window that was freed has none.
        return self._taken + count <= self._count

    def take(self, count: int) -> int:
        """Return the index of the first of ``count`` words that nobody has."""
        first = self._taken
        self._taken += -(-count // _APART) * _APART
        self._users += 1
        return first

    def give_back(self) -> None:
        """Return a part; free the window if it was the last one. Collective."""
        self._users -= 1
        if self._users:
            return
        self._taken = self._count
        self._end_progress()
        self.words = None
        self.mpi.Unlock_all()
        self.mpi.Free()


class AtomicWords:
    """64-bit integers in the memory of the rank ``root``. Collective.

    All are 0 at first. `fetch_add`, `exchange` and `compare_and_swap` are atomic among
    all ranks. The other writes are for words that one rank writes at a time: MPI
    libraries carry out the atomic calls as a load and a store under a lock, and a word
    that is stored in between is lost. Several threads may make calls at the same time.

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
        self._shared = _Window.of(group, root, count)
        self._window = self._shared.mpi
        # Their place in the window.
        self._first = first = self._shared.take(count)
        # The words themselves, where this rank may load and store them.
        self._words = words = self._shared.words
        if words is not None:
            self._words = words[first : first + count]
        # Called in each read, on the root of a group of several nodes.
        self._progress = None
        if self._words is not None and not group.single_node:
            self._progress = group.progress.look

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

    def exchange(self, index: int, value: int) -> int:
        """Set one word, which other ranks may change; return its value before."""
        return self._fetch(index, value, MPI.REPLACE, self._local.attempt)

    def _fetch(self, index: int, value: int, operation: Any, attempt: Attempt) -> int:
        result = attempt.result
        result[0], attempt.origin[0] = _NEVER, value
        place = self._first + index
        self._window.Fetch_and_op(attempt.origin, result, self.root, place, operation)
        self._complete()
        return int(result[0])

    def compare_and_swap(
        self, index: int, expected: int, new: int, attempt: Attempt | None = None
    ) -> int:
        """Set a word to ``new`` if it is ``expected``; return its value before."""
        attempt = attempt or self._local.attempt
        self._begin_swap(index, expected, new, attempt)
        self._complete()
        return int(attempt.result[0])

    def compare_and_swap_each(
        self, index: int, swaps: Sequence[tuple[int, int]], attempts: Sequence[Attempt]
    ) -> list[int]:
        """Do as several calls of `compare_and_swap`, in one round trip.

        Args:
            index: Of the word.
            swaps: For each, the value that is expected and the new one.
            attempts: Hold the outcomes; as many, or more.

        Returns:
            The value of the word before each.
        """
        made = attempts[: len(swaps)]
        for attempt, (expected, new) in zip(made, swaps, strict=True):
            # MPI keeps the order of those of one rank (MPI 4.1, section 12.7.2).
            self._begin_swap(index, expected, new, attempt)
        self._complete()
        return [int(attempt.result[0]) for attempt in made]

    def _begin_swap(
        self, index: int, expected: int, new: int, attempt: Attempt
    ) -> None:
        origin, compare, result = attempt.origin, attempt.compare, attempt.result
        # In this order: an earlier outcome must not pass for that of this swap.
        result[0] = _NEVER
        origin[0], compare[0] = new, expected
        place = self._first + index
        self._window.Compare_and_swap(origin, compare, result, self.root, place)

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        if self._words is not None:
            self._look()
            words = self._words[index : index + count].tolist()
            self._window.Sync()
            return words
        result = np.empty(count, np.int64)
        target = (self._first + index, count, MPI.LONG)
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
        target = (self._first + index, origin.size, MPI.LONG)
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
        """Free the words. Collective."""
        self._words = self._progress = None
        self._window = FREED
        self._shared.give_back()

"""Atomic words: 64-bit integers that all ranks of a node read and change."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.mpi.job.runtime import MPI
from hpcaccum.mpi.memory.windows import FREED, allocate, free
from hpcaccum.mpi.talk.group import Group

# No word of the package has this value.
_NEVER = -(1 << 63)
# The fewest words of a window; and the distance between two parts: two lines of the
# cache, which some processors fetch together.
_LEAST, _APART = 4096, 16
_WORD, _NUMBER = struct.Struct("q"), struct.Struct("d")


def bits(number: float) -> int:
    """Return a float as a word; that of a positive one is positive."""
    word: int = _WORD.unpack(_NUMBER.pack(number))[0]
    return word


def number_of(word: int) -> float:
    """Return the float of a word."""
    number: float = _NUMBER.unpack(_WORD.pack(word))[0]
    return number


class _Scratch(threading.local):
    """Buffers of one thread: a server thread may use the words that the user uses."""

    def __init__(self) -> None:
        # One word each: the operand, the expected value, the value before the change.
        self.origin, self.compare, self.result = np.full((3, 1), _NEVER, np.int64)
        # Whether MPI may still write to `result`: a signal handler raised meanwhile.
        self.pending = False


class AtomicWords:
    """64-bit integers in memory of the rank ``root``, which all share. Collective.

    All are 0 at first. `fetch_add`, `exchange` and `compare_and_swap` are atomic among
    all ranks. The other writes are for words that one rank writes at a time: MPI
    libraries carry out the atomic calls as a load and a store under a lock, and a word
    that is stored in between is lost. Several threads may make calls at the same time.

    Reads and writes are plain loads and stores beside a memory barrier. That costs a
    tenth of an RMA call, and a rank that polls does not slow down the others.

    Words also order other memory that ranks have mapped (`NodeMemory`). The barrier is
    a Win_sync. MPI defines its order for the memory of the window only, but in both
    libraries it is a full barrier of the processor. `write` and `store` have one
    before the store: a rank that sees the word sees all earlier stores of this rank.
    `read` and `read_range` have one after the load: later loads of this rank are at
    least as new as the word. A rank that reads memory first, and then a word to find
    out whether the memory was valid, needs `sync` in between.

    Attributes:
        direct: Whether a read is a plain load; not for ranks of other nodes, which have
            words by `hpcaccum.nodes.words_of`. The ranks of ``group`` are on one node.
        memory: The words themselves, if ``direct``: plain loads and stores. What this
            rank stores here must be a word that only this rank writes.
        sync: Called to order this rank's loads and stores before it with those after
            it.
    """

    direct = True

    def __init__(self, group: Group, root: int, count: int) -> None:
        assert group.single_node
        self.root, self._window_root = root, root
        self._local = _Scratch()
        self._shared = WordWindow.of(group, root, count)
        self._window = self._shared.mpi
        self.sync: Callable[[], None] = self._window.Sync
        # Their place in the window, and the words themselves.
        self._first = first = self._shared.take(count)
        self.memory: memoryview = self._shared.words[first : first + count]
        # Whether MPI changes a word before the call returns. MPICH sends a rank that is
        # alone a message to itself.
        self._at_once = group.size > 1

    def read(self, index: int) -> int:
        """Return one word."""
        word: int = self.memory[index]
        self.sync()
        return word

    def exchange(self, index: int, value: int) -> int:
        """Set one word, which other ranks may change; return its value before."""
        return self.fetch_add(index, value, MPI.REPLACE)

    def fetch_add(self, index: int, value: int, operation: Any = None) -> int:
        """Add to one word; return its value before."""
        local = self._local
        if local.pending:
            # No outcome of an earlier change may come later.
            self._complete()
        local.pending = True
        local.result[0], local.origin[0] = _NEVER, value
        place, operation = self._first + index, operation or MPI.SUM
        self._window.Fetch_and_op(
            local.origin, local.result, self._window_root, place, operation
        )
        return self._outcome(local.result)

    def compare_and_swap(self, index: int, expected: int, new: int) -> int:
        """Set a word to ``new`` if it is ``expected``; return its value before."""
        local = self._local
        if local.pending:
            self._complete()
        local.pending = True
        origin, compare, result = local.origin, local.compare, local.result
        result[0], origin[0], compare[0] = _NEVER, new, expected
        place = self._first + index
        self._window.Compare_and_swap(origin, compare, result, self._window_root, place)
        return self._outcome(result)

    def _outcome(self, result: Array) -> int:
        """Complete the change that this thread has begun; return its outcome."""
        # A flush yields the core, also if nothing is left to do. Where ranks share
        # cores, that may cost the rest of a time slice.
        if self._at_once and result.item() != _NEVER:
            self.sync()
            self._local.pending = False
        else:
            self._complete()
        return result.item()  # type: ignore[no-any-return]

    def _complete(self) -> None:
        self._window.Flush(self._window_root)
        self._local.pending = False

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        words = self.memory[index : index + count].tolist()
        self.sync()
        return words

    def watch(self, index: int) -> Callable[[], int]:
        """Return what reads a word as `read`, without an order; only if `direct`."""
        return functools.partial(self.memory.__getitem__, index)

    def write(self, index: int, value: int) -> None:
        """Set one word."""
        self.sync()
        self.memory[index] = value
        self.sync()

    def store(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically."""
        self.sync()
        for place, value in enumerate(values, index):
            self.memory[place] = value
        self.sync()

    def store_unordered(self, index: int, value: int) -> None:
        """Set a word that only this rank writes, as `write` but without a barrier."""
        self.memory[index] = value

    def free(self) -> None:
        """Free the words. Collective."""
        if self._local.pending:
            self._complete()
        self.memory = FREED
        self._window = FREED
        self.sync = functools.partial(getattr, FREED, "Sync")
        self._shared.give_back()


class WordWindow:
    """A window on the rank ``root`` with words, of which `AtomicWords` have parts.

    MPI needs milliseconds and a communicator for a window, of which MPICH has 2,048. So
    a group keeps one for each rank that has words, until its communicators are freed.

    No word is used twice. So all words of a part are 0 at first, and no rank has to
    wait for the others when it takes or returns a part. All ranks of the group take
    words in the same order, and compare at times how many they have taken
    (`Group.agree`). Making one, and freeing it, are collective.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        # How many words there are, have been taken, and parts of them that are in use.
        self._count, self.taken, self._users = count, 0, 0
        # Whether no more parts are taken, so that the last one to be returned frees it.
        self._full = False
        self.mpi = allocate(group, root, count * 8, 8)
        memory: Any = self.mpi.Shared_query(root)[0]
        self.words = memoryview(memory).cast("B").cast("q")
        self._group = group
        group.at_close(self.free)

    @classmethod
    def of(cls, group: Group, root: int, count: int) -> WordWindow:
        """Return a window on a rank with room for ``count`` words. Collective."""
        found = group.words.get(root)
        if found is not None and found.taken + count <= found._count:
            return cast(WordWindow, found)
        made = group.words[root] = cls(group, root, max(count, _LEAST))
        if found is not None:
            found._full = True
            found._free_if_unused()
        return made

    def take(self, count: int) -> int:
        """Return the index of the first of ``count`` words that nobody has."""
        first = self.taken
        self.taken += -(-count // _APART) * _APART
        self._users += 1
        return first

    def give_back(self) -> None:
        """Return a part. Collective if the window is full and this is the last one."""
        self._users -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._full and not self._users:
            self.free()

    def free(self) -> None:
        """Free it, of which no object has words any more. Collective."""
        self._group.forget(self.free)
        self.words.release()
        free(self.mpi)

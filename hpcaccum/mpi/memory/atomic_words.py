"""Atomic words: 64-bit integers on one rank that all ranks read and change."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import EAGER, nap_after
from hpcaccum.mpi.job.runtime import MPI, is_open_mpi
from hpcaccum.mpi.memory.windows import FREED, memory_barrier
from hpcaccum.mpi.memory.word_window import WordWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi.talk.group import Group

# No word of the package has this value.
_NEVER = -(1 << 63)

# Seconds to look for an outcome before waiting in MPI: a word may happen to have the
# value that means "not yet".
_PATIENT = 1.0


class _Scratch(threading.local):
    """Buffers of one thread: a server thread may use the words that the user uses."""

    def __init__(self) -> None:
        # One word each: the operand, the expected value, the value before the change.
        self.origin, self.compare, self.result = np.full((3, 1), _NEVER, np.int64)
        # MPI reads these until the next flush.
        self.posted: list[Array] = []
        # Whether MPI may still write to `result`: a signal handler raised meanwhile.
        self.pending = False


class AtomicWords:
    """64-bit integers in the memory of the rank ``root``. Collective.

    All are 0 at first. `fetch_add`, `exchange` and `compare_and_swap` are atomic among
    all ranks. The other writes are for words that one rank writes at a time: MPI
    libraries carry out the atomic calls as a load and a store under a lock, and a word
    that is stored in between is lost. Several threads may make calls at the same time.

    Where the ranks share a node, and on the root, reads and writes are plain loads and
    stores beside a `memory_barrier`. That costs a tenth of an RMA call, and a rank that
    polls does not slow down the others.

    Words also order the memory that ranks of one node have mapped (`NodeMemory`). The
    barrier is a Win_sync. MPI defines its order for the memory of the window only, but
    in both libraries it is a full barrier of the processor. `store` and `write` have
    one before the store: a rank that sees the word sees all earlier stores of this
    rank. `read` and `read_range` have one after the load: later loads of this rank are
    at least as new as the word. A rank that reads memory first, and then a word to find
    out whether the memory was valid, needs `sync` in between. All of this holds for the
    ranks of one node also if the words are on another one.

    Args:
        group: The ranks.
        root: The rank with the window.
        count: Number of words.

    Attributes:
        root: As given.
        near: Whether the words are on this node.
        unaided: Whether this rank changes them without the help of the root's threads.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self.root = root
        self._local = _Scratch()
        self._shared = WordWindow.of(group, root, count)
        self._window = self._shared.mpi
        self._barrier = memory_barrier(group, self._window)
        # Their place in the window.
        self._first = first = self._shared.take(count)
        # The words themselves, where this rank may load and store them.
        self._words = words = self._shared.words
        if words is not None:
            self._words = words[first : first + count]
        # Whether MPI changes a word before the call returns: it lies in memory of this
        # node. MPICH sends a rank that is alone there a message to itself.
        ranks = group.node_ranks
        self.near = root in ranks
        self._at_once = self.near and len(ranks) > 1
        # Whether several changes take one round trip. Open MPI waits in each call: in a
        # compare-and-swap for one round trip, in others for three, as they lock the
        # word. Measured with 5.0 over TCP.
        self._pipelined = words is None and not self.near and not is_open_mpi()
        # If the group spans nodes, Open MPI asks the root also on this node.
        self.unaided = words is not None or (self.near and not is_open_mpi())
        # Lets other nodes answer while this rank waits, or change words that it polls.
        progress = None if group.single_node else group.progress
        self._progress = None if progress is None or self.near else progress.look
        self._help = None if progress is None else progress.look_for_others

    @property
    def direct(self) -> bool:
        """Whether a read of this rank is a plain load."""
        return self._words is not None

    def read(self, index: int) -> int:
        """Return one word."""
        if self._words is not None:
            if self._help is not None:
                self._help()
            word = self._words[index]
        else:
            # It changes nothing; with Open MPI, a fetch takes three times as long.
            word = self.compare_and_swap(index, _NEVER, _NEVER)
        self._barrier()
        return word

    def peek(self, index: int) -> int | None:
        """Return one word as `read`, without an order; None if it is not `direct`."""
        words: Any = self._words
        return None if words is None else words[index]

    def fetch_add(self, index: int, value: int) -> int:
        """Add to one word; return its value before."""
        return self._fetch(index, value, MPI.SUM)

    def exchange(self, index: int, value: int) -> int:
        """Set one word, which other ranks may change; return its value before."""
        return self._fetch(index, value, MPI.REPLACE)

    def _fetch(self, index: int, value: int, operation: Any) -> int:
        self._begin()
        local = self._local
        local.result[0], local.origin[0] = _NEVER, value
        place = self._first + index
        self._window.Fetch_and_op(
            local.origin, local.result, self.root, place, operation
        )
        return self._outcome(local.result)

    def compare_and_swap(self, index: int, expected: int, new: int) -> int:
        """Set a word to ``new`` if it is ``expected``; return its value before."""
        self._begin()
        local = self._local
        origin, compare, result = local.origin, local.compare, local.result
        result[0], origin[0], compare[0] = _NEVER, new, expected
        place = self._first + index
        self._window.Compare_and_swap(origin, compare, result, self.root, place)
        return self._outcome(result)

    def _begin(self) -> None:
        """Begin a change: no outcome of an earlier one may come later."""
        if self._local.pending:
            self._complete()
        self._local.pending = True

    def _outcome(self, result: Array) -> int:
        """Complete the changes that this thread has begun; return the last outcome.

        A flush yields the core, also if nothing is left to do, and again and again
        while the outcome is on its way. Where ranks share cores, each time may cost the
        rest of a time slice. So this rank yields for as long as an answer usually
        takes, and then naps until the outcome is there.

        The flush after that is still needed where a message brings the outcome: memcpy
        of glibc stores 8 bytes twice, and another thread in MPI may be between the two.
        The second store would pass for the outcome of the next change.
        """
        if self._progress is not None:
            self._wait_for(result, self._progress)
        if self._at_once and result.item() != _NEVER:
            self._barrier()
            self._local.pending = False
        else:
            self._complete()
        return result.item()  # type: ignore[no-any-return]

    def _wait_for(self, result: Array, look: Callable[[], None]) -> None:
        """Wait until MPI has written the outcome of a change, or for `_PATIENT`."""
        begun, elapsed = time.monotonic(), 0.0
        while result.item() == _NEVER and elapsed < _PATIENT:
            look()
            if elapsed < EAGER:
                # To ranks that share this core, on which the outcome may depend.
                os.sched_yield()
            else:
                time.sleep(nap_after(elapsed))
            elapsed = time.monotonic() - begun

    def read_range(self, index: int, count: int) -> list[int]:
        """Return several words, each read atomically (not all at one moment)."""
        if self._words is not None:
            if self._help is not None:
                self._help()
            words = self._words[index : index + count].tolist()
            self._barrier()
            return words
        result = np.full(count, _NEVER, np.int64)
        target = (self._first + index, count, MPI.LONG)
        try:
            self._window.Get_accumulate(
                [None, 0, MPI.LONG], result, self.root, target, MPI.NO_OP
            )
            if self._progress is not None and count:
                self._wait_for(result[-1:], self._progress)
        finally:
            # Also after an exception: MPI must not write to memory that is freed.
            self._window.Flush(self.root)
        self._barrier()
        return result.tolist()  # type: ignore[no-any-return]

    def watch(self, index: int) -> Callable[[], int]:
        """Return a function that reads a word as `read`, but orders no later loads.

        For a rank that polls; `read` comes last.
        """
        words: Any = self._words
        if words is None:
            return functools.partial(self.read, index)
        return functools.partial(words.__getitem__, index)

    def write(self, index: int, value: int, was: int | None = None) -> None:
        """Set one word; complete on return.

        Args:
            index: Of the word.
            value: The new one.
            was: The value that it probably has, if this rank knows it.
        """
        if self._words is not None:
            self.store(index, [value])
        else:
            # One message less than a store and its flush.
            self._barrier()
            self._replace(index, value, was)

    def _replace(self, index: int, value: int, was: int | None) -> None:
        # With Open MPI, the second of these takes three times as long.
        if was is None or self.compare_and_swap(index, was, value) != was:
            self.exchange(index, value)

    def write_range(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; complete on return."""
        self.store(index, values)
        self.flush()

    def store(self, index: int, values: Sequence[int]) -> None:
        """Set several words, each atomically; complete after the next `flush`."""
        # Also before a word that leaves the node: see the class.
        self._barrier()
        if self._words is None:
            self._send(index, values)
            return
        for place, value in enumerate(values, index):
            self._words[place] = value
        self._barrier()

    def store_unordered(self, index: int, value: int, was: int) -> None:
        """Set a word that only this rank writes, as `store` but without a barrier.

        Args:
            index: Of the word.
            value: The new one.
            was: The value that it probably has.
        """
        if self._words is not None:
            self._words[index] = value
        elif self._pipelined:
            self._send(index, [value])
        else:
            self._replace(index, value, was)

    def _send(self, index: int, values: Sequence[int]) -> None:
        origin = np.array(values, np.int64)
        self._local.posted.append(origin)
        target = (self._first + index, origin.size, MPI.LONG)
        self._window.Accumulate(origin, self.root, target, MPI.REPLACE)

    def sync(self) -> None:
        """Order this rank's loads and stores before it with those after it."""
        self._barrier()

    def flush(self) -> None:
        """Complete all stores at the root."""
        if self._at_once and self._words is None:
            self._complete()
        elif self._words is None:
            # Stores have no outcome for which this rank could nap. This read has one,
            # which comes after them, and the flush after it needs no time.
            self.compare_and_swap(0, _NEVER, _NEVER)

    def _complete(self) -> None:
        self._window.Flush(self.root)
        self._local.posted.clear()
        self._local.pending = False

    def free(self) -> None:
        """Free the words. Collective."""
        if self._local.pending:
            self._complete()
        self._words = self._progress = self._help = None
        self._window = FREED
        self._barrier = functools.partial(getattr, FREED, "Sync")
        self._shared.give_back()

"""Updates that all ranks of a node carry out together.

If the elements are independent, an update needs one pass over the memory: the
gradients of a chunk are summed, the center is updated, and copied to where ranks read
it, while the chunk is in the cache. The root begins an update and works on its pieces.
Ranks that wait for the update take pieces, too; ranks that compute are not needed.

Which rank works on a piece changes no bit of the result.

A rank may die at any point of its work. Before it changes a chunk, it has saved the
slots of the chunk, and says so; the center's values are in the published copy, too. So
the root can make the pieces of that rank again, from the chunk where it was.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from hpcaccum.accumulator import Batch
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array, quiet
from hpcaccum.layout import Layout
from hpcaccum.mpi import MPI, AtomicWords, Group, memory_of_rank, or_abort
from hpcaccum.nodes import NodeParts
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.spans import traced
from hpcaccum.summation import add_at_once
from hpcaccum.worker_threads import run_elsewhere

# Elements that stay in the cache, but long enough that calling NumPy costs little.
# Measured with 1 MiB of L2, 2 ranks, SGD: best of 2**13 to 2**16 at 1 and 64 MiB.
_CHUNK = 1 << 15
# Pieces for each thread, so that one that comes late finds some; and their least and
# their largest size.
_SHARES, _LEAST, _MOST = 4, 1 << 15, 1 << 19
# Elements for which a rank wakes another thread.
_THREAD = 1 << 18
# Words: the next piece to work on, and how many are complete; then of each piece, who
# works on which chunk; of each worker, whether it works.
_NEXT, _DONE, _PLACES = 0, 8, 16
# Bytes of an update, pickled, at most; and for each rank.
_FIXED, _FOR_RANK = 256, 128
# The word of the next piece: the number of the update, which begins again at 0 after so
# many, and the piece.
_NUMBERED, _BITS = 1 << 31, 32
_PIECE = (1 << _BITS) - 1
# The word of a piece: the number of the update, the worker, and the chunk in which it
# is; or that all are done.
_WORKER_BITS = 16
_ALL_DONE = (1 << _WORKER_BITS) - 1
# The words of two workers are on different cache lines.
_APART = 8


class ElementwiseRule(Protocol):
    """A rule of updates that changes each element independently of the others.

    Its ``slots`` are name to initial value, each a vector like the parameters.
    """

    slots: Mapping[str, float]

    def numbers(self) -> Sequence[float] | None:
        """Return at most 4 numbers of the next update of all variables. The root only.

        None if the variables have had different numbers of updates.
        """

    def count(self) -> None:
        """Count an update of all variables. The root only."""

    # Called with some elements of the center, of the gradient and of each slot, with
    # working memory of the same size, and with the numbers; on any rank.
    update: Callable[..., None]


class _Update(NamedTuple):
    """One update, as all ranks see it."""

    copy: Array
    gradients: Sequence[Array]
    factors: Sequence[float]
    divisor: float
    # What the mean is multiplied by.
    factor: float
    numbers: Sequence[float]


class NodeUpdate:
    """The center and its slots in memory of the node, and their updates. Collective.

    Variables, gradients in ``parts`` and parameters in ``copies`` are of one dtype.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        rule: ElementwiseRule,
        layout: Layout,
        parts: NodeParts,
        copies: DoubleBuffer,
    ) -> None:
        self._rule, self._layout, self._parts = rule, layout, parts
        self._copies, self._ranks, self._lost = copies, group.size, group.lost
        # This rank's threads that work on an update.
        self._working: Sequence[Future[None]] = ()
        # Other threads of this rank may work, too, if MPI permits it.
        self._helps = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        most = max(1, layout.size // (_THREAD * group.size))
        # The same number on all ranks, as each thread has a place for what it saves.
        self._threads = min(group.least_cores, most) if self._helps else 1
        workers = group.size * min(group.least_cores, most)
        share = -(-layout.size // (_SHARES * workers * _CHUNK)) * _CHUNK
        self._piece = min(max(share, _LEAST), _MOST)
        self._pieces = max(1, -(-layout.size // self._piece))
        with contextlib.ExitStack() as undo:
            workers = group.size * self._threads
            self._busy = -(-(_PLACES + self._pieces) // _APART) * _APART
            self._words = AtomicWords(group, root, self._busy + _APART * workers)
            undo.callback(self._words.free)
            if group.rank == root:
                # No rank helps before all have the memory.
                self._words.write(_NEXT, self._pieces)
            self._center, *self._slots = self._allocate(group, root)
            undo.pop_all()
        # Those of this rank that do not work, each with memory of its own.
        first = group.rank * self._threads
        numbers = range(first, first + self._threads)
        self._workers = [(number, self._new_scratch()) for number in numbers]
        if group.rank == root:
            for slot, start in zip(self._slots, rule.slots.values(), strict=True):
                slot.fill(start)

    def _allocate(self, group: Group, root: int) -> Array:
        """Return memory of the node: a vector for the center, and one for each slot."""
        layout, slots = self._layout, len(self._rule.slots)
        size, dtype = layout.size, layout.dtype
        # Two chunks of each worker: while it saves one, the one before must stay.
        shape = group.size * self._threads, 2, slots, min(_CHUNK, self._piece)
        count = (1 + slots) * size + math.prod(shape)
        nbytes, room = count * dtype.itemsize, _FIXED + _FOR_RANK * group.size
        memory = memory_of_rank(group, root, nbytes + room)
        # The update that ranks work on, pickled.
        self._update = memory[nbytes:]
        vectors, saved = np.split(memory[:nbytes].view(dtype), [(1 + slots) * size])
        self._saved = saved.reshape(shape)
        return vectors.reshape(1 + slots, size)

    def _new_scratch(self) -> Array:
        return np.empty((2, min(_CHUNK, self._layout.size)), self._layout.dtype)

    @property
    def center(self) -> dict[str, Array]:
        """The center's arrays by name."""
        return self._layout.views(self._center)

    @property
    def slots(self) -> dict[str, dict[str, Array]]:
        """The arrays of each slot of the rule, by name."""
        pairs = zip(self._rule.slots, self._slots, strict=True)
        return {slot: self._layout.views(vector) for slot, vector in pairs}

    def apply(self, batch: Batch, copy: Array, what: str) -> bool:
        """Update all variables, and write them to a copy; the root only.

        False if the rule cannot update all variables alike; nothing has changed then.
        """
        numbers = self._rule.numbers()
        if numbers is None:
            return False
        self._rule.count()
        if self._pieces == 1:
            # Too short to share.
            update = self._as_update(batch, copy, numbers)
            with quiet():
                for chunk in self._chunks(0):
                    self._work_on_chunk(chunk, update, self._workers[0][1])
            return True
        number = self._announce(batch, numbers)
        if self._threads > 1:
            self._start(self._threads - 1)
        self._work(number, self._as_update(batch, copy, numbers))
        Deadline(None, what).wait(
            self._complete, lambda: "ranks of this node that work on the update"
        )
        return True

    def _as_update(
        self, batch: Batch, copy: Array, numbers: Sequence[float]
    ) -> _Update:
        gradients, mean = batch.views(self._layout.size), (batch.divisor, batch.factor)
        return _Update(copy, gradients, batch.factors, *mean, numbers)

    def _complete(self) -> bool | None:
        """Return True when all pieces are done; does those of ranks that have died."""
        if self._words.read(_DONE) == self._pieces:
            return True
        # All pieces are taken: what is not done, and nobody works on, was theirs.
        if not self._lost or self._others_work():
            return None
        number, update = self._words.read(_NEXT) >> _BITS, self._announced()
        for piece in range(self._pieces):
            self._do_rest(piece, number, update)
        return True

    def _others_work(self) -> bool:
        count = self._ranks * self._threads
        words = self._words.read_range(self._busy, _APART * count)[::_APART]
        return any(
            word and worker // self._threads not in self._lost
            for worker, word in enumerate(words)
        )

    def _do_rest(self, piece: int, number: int, update: _Update) -> None:
        """Do what a rank that has died has not done of a piece."""
        word, begun = self._words.read(_PLACES + piece), 0
        if word >> _BITS == number:
            worker, begun = word >> _WORKER_BITS & _ALL_DONE, word & _ALL_DONE
            if begun == _ALL_DONE:
                return
            chunk = self._chunks(piece)[begun]
            self._center[chunk] = self._copies.copy(1 - self._copies.writing)[chunk]
            saved = self._saved[worker, begun & 1]
            for slot, values in zip(self._slots, saved, strict=True):
                slot[chunk] = values[: chunk.stop - chunk.start]
        scratch = self._new_scratch()
        with quiet():
            for chunk in self._chunks(piece)[begun:]:
                self._work_on_chunk(chunk, update, scratch)

    def _announce(self, batch: Batch, numbers: Sequence[float]) -> int:
        """Have ranks that wait work on an update; return its number."""
        mean = [*batch.places], batch.divisor, batch.factor
        data = pickle.dumps((self._copies.writing, mean, [*map(float, numbers)]))
        self._update[: len(data)] = np.frombuffer(data, np.uint8)
        self._words.write(_DONE, 0)
        # Last: from now on other ranks take pieces. No store, as they change the word
        # also while they find that none are left.
        number = ((self._words.read(_NEXT) >> _BITS) + 1) % _NUMBERED
        self._words.exchange(_NEXT, number << _BITS)
        return number

    def _announced(self) -> _Update:
        copy, (places, divisor, factor), numbers = pickle.loads(self._update.data)
        dtype = self._layout.dtype
        batch = Batch(self._parts, places, dtype, divisor, factor=factor)
        return self._as_update(batch, self._copies.copy(copy), numbers)

    def help(self) -> None:
        """Work on the pieces of an update, if any are left."""
        if not self._helps or self._words.read(_NEXT) & _PIECE >= self._pieces:
            return
        # In threads: an exception of a signal handler ends the wait, not the work.
        self._start(self._threads)
        self._join()

    def _start(self, threads: int) -> None:
        """Work in other threads, once those of an earlier update have ended."""
        self._join()
        self._working = run_elsewhere(or_abort(self._work), threads)

    def _join(self) -> None:
        for call in self._working:
            call.result()
        self._working = ()

    @traced("update")
    def _work(self, number: int = -1, update: _Update | None = None) -> None:
        """Work on pieces until none are left; the root passes the update."""
        words, (worker, scratch) = self._words, self._workers.pop()
        busy = self._busy + _APART * worker
        # Before it takes a piece, so that the root knows who may have one.
        words.write(busy, 1)
        with quiet():
            while (word := words.fetch_add(_NEXT, 1)) & _PIECE < self._pieces:
                # Words of an update do not change before all pieces are complete.
                if update is None or word >> _BITS != number:
                    number, update = word >> _BITS, self._announced()
                for chunk in self._saving(word & _PIECE, number, worker):
                    self._work_on_chunk(chunk, update, scratch)
                words.fetch_add(_DONE, 1)
        words.write(busy, 0)
        self._workers.append((worker, scratch))

    def _chunks(self, piece: int) -> list[slice]:
        start = piece * self._piece
        stop = min(start + self._piece, self._layout.size)
        return [slice(a, min(a + _CHUNK, stop)) for a in range(start, stop, _CHUNK)]

    def _saving(self, piece: int, number: int, worker: int) -> Iterator[slice]:
        """Yield the chunks of a piece, each when it may be changed."""
        place, tag = _PLACES + piece, number << _BITS | worker << _WORKER_BITS
        for count, chunk in enumerate(self._chunks(piece)):
            saved = self._saved[worker, count & 1]
            for slot, values in zip(self._slots, saved, strict=True):
                values[: chunk.stop - chunk.start] = slot[chunk]
            self._words.write(place, tag | count)
            yield chunk
        self._words.write(place, tag | _ALL_DONE)

    def _work_on_chunk(self, chunk: slice, update: _Update, scratch: Array) -> None:
        value = self._center[chunk]
        mean, products = scratch[:, : value.size]
        gradients = [gradient[chunk] for gradient in update.gradients]
        if len(gradients) == 1 and update.divisor == update.factor == 1:
            mean = gradients[0]
        else:
            add_at_once(gradients, mean, update.divisor, update.factors, products)
        if update.factor != 1:
            np.multiply(mean, update.factor, mean)
        slots = [slot[chunk] for slot in self._slots]
        self._rule.update(value, mean, *slots, products, *update.numbers)
        update.copy[chunk] = value

    def free(self) -> None:
        """Free the memory, which lives as long as views of it. Collective."""
        self._join()
        self._words.free()
        self._workers.clear()
        self._center, *self._slots = np.empty((1 + len(self._slots), 0))
        self._saved, self._update = np.empty((0, 0, 0, 0)), np.empty(0, np.uint8)

"""Sums of large arrays over the ranks of a node, without a copy.

Gradients lie where others see them, each rank sums one stripe of all, and all read the
results where they lie. The ranks meet twice, but no byte is moved that the arithmetic
does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.layout import ALIGNMENT
from hpcaccum.mpi import AtomicWords, NodeMemory
from hpcaccum.reducer.call import BITS, NOTHING, Quiet, agree
from hpcaccum.reducer.spin_wait import SpinWait
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum.layout import Layout
    from hpcaccum.mpi import Group
    from hpcaccum.reducer.call import Wait

Array = np.ndarray[Any, Any]

# Buckets that a rank which copies its gradients in has under way: one is filled while
# others sum the one before and read the one before that.
_STAGES = 3


def stripe(bucket: slice, part: int, parts: int, itemsize: int) -> slice:
    """Return one of several parts of a bucket; they begin on cache lines."""
    line = ALIGNMENT // itemsize
    width = -(-(bucket.stop - bucket.start) // (parts * line)) * line
    begin = min(bucket.start + part * width, bucket.stop)
    return slice(begin, min(begin + width, bucket.stop))


def _bytes(elements: slice, itemsize: int) -> slice:
    return slice(elements.start * itemsize, elements.stop * itemsize)


def _inside(layout: Layout, piece: slice) -> tuple[str, slice] | None:
    """Return the array in which a piece of the buffer lies, and where; if in one."""
    for name, elements, where in layout.overlaps(piece):
        if where == slice(0, piece.stop - piece.start):
            return name, elements
    return None


def _around(whole: slice, part: slice) -> list[slice]:
    """Return what is before and after a part."""
    pieces = [slice(whole.start, part.start), slice(part.stop, whole.stop)]
    return [piece for piece in pieces if piece.start < piece.stop]


class NodeSum:
    """Sums of large arrays over the ranks of a node.

    Words say how far each rank is, counted over all calls: one with how many buckets
    it has brought (and whether it brought them in stages), one with how many it has
    summed its stripe of, and the signature of the call.

    Args:
        group: The ranks of the node.
        layout: Of the arrays.
        buckets: Pieces of the buffer, in the order of work.
        stripes: How many ranks, the first ones, do the sums.
        progress: Called while waiting.

    Attributes:
        arrays: This rank's arrays.
        results: Of the last call, for all ranks of the node.
        sent, received: The flat memory of the two.
        stripes: This rank's stripe of the results of each bucket.
        summed: In how many buckets this rank has summed its stripe.
        divisor: Of the sums.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        buckets: list[slice],
        stripes: int,
        progress: Callable[[], object] | None = None,
    ) -> None:
        self._group, self.buckets, self.divisor = group, buckets, 1
        wide = accumulation_dtype(layout.dtype)
        common = layout.size * wide.itemsize
        mine = [stripe(b, group.rank, stripes, wide.itemsize) for b in buckets]
        self._memory = NodeMemory(
            group,
            [layout.nbytes] * group.size,
            common,
            [_bytes(each, wide.itemsize) for each in mine],
        )
        parts = [part.view(layout.dtype) for part in self._memory.parts]
        total = self._memory.common.view(wide)
        self.arrays = layout.views(parts[group.rank])
        self.results = layout.views(total)
        self.window_bytes = layout.nbytes
        self.result_bytes = common if group.rank == 0 else 0
        self._mine = self.sent = parts[group.rank]
        self.received = total
        self.stripes = [total[each] for each in mine]
        self._total, self._overlaps = total, [layout.overlaps(b) for b in buckets]
        self._inside = [_inside(layout, each) for each in mine]
        self._stages = [self._stage(number) for number in range(len(buckets))]
        self._places = [
            [
                [part[each] for part in parts],
                [part[self._moved(n, each)] for part in parts],
            ]
            for n, each in enumerate(mine)
        ]
        self._words = AtomicWords(group, 0, 2 * group.size)
        self._spin, self._quiet = SpinWait(group, progress), Quiet()
        self._threads = group.own_cores
        self._base = self._brought = self.summed = 0

    def _stage(self, number: int) -> slice:
        """Return the place of an early bucket, where this one lies in stages."""
        size = self.buckets[number].stop - self.buckets[number].start
        start = self.buckets[number % _STAGES].start
        return slice(start, start + size)

    def _moved(self, number: int, piece: slice) -> slice:
        shift = self._stages[number].start - self.buckets[number].start
        return slice(piece.start + shift, piece.stop + shift)

    def bring(self, count: int, *, staged: bool = False) -> None:
        """Say how many buckets this rank has brought."""
        if count > self._brought:
            self._brought = count
            word = self._base + count << 1 | staged
            self._words.store(self._group.rank, [word])

    def offer(self, count: int) -> None:
        """Bring buckets, and sum those that all ranks have brought."""
        self.bring(count)
        words = self._words.read_range(0, self._group.size)
        least = (min(words) >> 1) - self._base
        while self.summed < min(least, len(self.buckets)):
            self._sum(words)

    def sum_next(self, wait: Wait, sources: Mapping[str, Array] = NOTHING) -> None:
        """Wait until all ranks have brought one more bucket, and sum it.

        Args:
            wait: Waits for long.
            sources: What `fill` was given.
        """
        size, least = self._group.size, self._base + self.summed + 1 << 1
        words = self._words.read_range(0, size)
        if min(words) < least:
            read = self._words.read_range
            self._spin(lambda: min(read(0, size)) >= least, wait)
            words = read(0, size)
        self._sum(words, sources)

    def _sum(self, words: list[int], sources: Mapping[str, Array] = NOTHING) -> None:
        out, places = self.stripes[self.summed], self._places[self.summed]
        parts = [places[word & 1][rank] for rank, word in enumerate(words)]
        own = self._source(self.summed, sources)
        if own is not None:
            parts[self._group.rank] = own
        self.summed += 1
        if out.size:
            self._quiet(add_in_order, parts, out, self.divisor, self._threads)

    def _source(self, number: int, sources: Mapping[str, Array]) -> Array | None:
        """Return what this rank is to sum of its own, if it lies in one array."""
        inside = self._inside[number]
        if inside is None or (array := sources.get(inside[0])) is None:
            return None
        return array[inside[1]] if array.dtype == self._mine.dtype else None

    def fill(self, number: int, sources: Mapping[str, Array]) -> None:
        """Copy one bucket of vectors to its stage, except what only this rank reads."""
        skipped = None
        if self._source(number, sources) is not None:
            skipped = self._inside[number]
        place = self._mine[self._stages[number]]
        for name, elements, where in self._overlaps[number]:
            if name not in sources:
                continue
            pieces = [elements]
            if skipped and skipped[0] == name:
                pieces = _around(elements, skipped[1])
            for piece in pieces:
                begin = where.start + piece.start - elements.start
                target = place[begin : begin + piece.stop - piece.start]
                np.copyto(target, sources[name][piece], casting="same_kind")

    def drain(self, number: int, out: Mapping[str, Array]) -> None:
        """Copy one bucket of the results to flat arrays."""
        total = self._total[self.buckets[number]]
        for name, elements, where in self._overlaps[number]:
            if name in out:
                np.copyto(out[name][elements], total[where], casting="same_kind")

    def report(self, signature: int) -> None:
        """Say how many stripes this rank has summed; and that the call is complete."""
        count = self.summed + (self.summed == len(self.buckets))
        word = self._base + count << BITS | signature
        self._words.store(self._group.size + self._group.rank, [word])

    def read(self, count: int, wait: Wait) -> list[int]:
        """Wait until all ranks have summed that many; return their words."""
        size, least = self._group.size, self._base + count << BITS
        read = self._words.read_range
        if min(words := read(size, size)) < least:
            self._spin(lambda: min(read(size, size)) >= least, wait)
            words = read(size, size)
        return words

    def end(self, signature: int, wait: Wait) -> bool:
        """Wait for the results of all; return whether all have one signature."""
        words = self.read(len(self.buckets) + 1, wait)
        self._base += len(self.buckets) + 1
        self._brought = self.summed = 0
        return agree(words, self._base << BITS | signature)

    def late(self) -> list[int]:
        """Return the ranks that this one waits for."""
        size, complete = self._group.size, self._base + len(self.buckets)
        words = self._words.read_range(0, 2 * size)
        if (done := self._base + self.summed) < complete:
            # Others, too, have not brought all while they wait.
            return [r for r in range(size) if words[r] >> 1 <= done]
        return [r for r in range(size) if words[size + r] >> BITS <= complete]

    def free(self, *, abandoned: bool = False) -> None:
        """Free the words, and let go of the memory. Collective."""
        self.arrays, self.results = {}, {}
        self._mine = self._total = np.empty(0, self._total.dtype)
        self.sent = self.received = self._total
        self._places, self.stripes = [], []
        self._memory.free()
        self._words.free()

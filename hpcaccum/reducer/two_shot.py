"""Sums of large arrays over the ranks of a node, with two synchronizations.

Each rank has its arrays in shared memory. It sums one stripe of each bucket over all
ranks; then all ranks read the results in place. So no byte is moved that the
arithmetic does not need.
"""

from __future__ import annotations

import functools
import itertools
from operator import or_

from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.layout import ALIGNMENT
from hpcaccum.mpi import AtomicWords, NodeMemory, bits
from hpcaccum.reducer.schedule import Call, Case, Numbers, Plan, Schedule
from hpcaccum.reducer.staging import StagedCopies, Staging, copy, stages
from hpcaccum.summation import Quiet, add_in_order

# Bytes of the largest bucket of which threads share the work.
_MOST_SHARED = 16 << 20


def stripe(bucket: slice, part: int, parts: int, itemsize: int) -> slice:
    """Return one of several parts of a bucket; they begin on cache lines."""
    line = ALIGNMENT // itemsize
    width = -(-(bucket.stop - bucket.start) // (parts * line)) * line
    begin = min(bucket.start + part * width, bucket.stop)
    return slice(begin, min(begin + width, bucket.stop))


class NodeSum(Schedule):
    """Sums of large arrays over the ranks of a node.

    Two words for each rank count over all calls: one the buckets that it has
    contributed, and whether they are staged and whether its weight is not 1; one the
    stripes that it has summed. Then there are two blocks, used in turn, with the
    signatures of all ranks; and the weights of this call that are not 1, with their
    factors, which no rank changes before all stripes are summed.

    If a plan goes on without ranks that have died, the next rank sums the stripes of
    such a rank. Each rank then contributes all its buckets at once, and sums a stripe.

    Args:
        plan: Its group has the ranks of the node.
        summing: How many ranks, the first ones, sum a stripe of each bucket: one of
            `stripes`, at `stripe_slices`; `summed` counts those of this rank.

    All ranks share `received`.
    """

    def __init__(self, plan: Plan, summing: int) -> None:
        group, layout, buckets = plan.group, plan.layout, plan.buckets
        self._rank, self._size, self._count = group.rank, group.size, len(buckets)
        wide = accumulation_dtype(layout.dtype)
        mine = [stripe(b, group.rank, summing, wide.itemsize) for b in buckets]
        common = layout.size * wide.itemsize
        self._memory = NodeMemory(
            group,
            [layout.nbytes] * group.size,
            common,
            [_bytes(each, wide.itemsize) for each in mine],
        )
        parts = [part.view(layout.dtype) for part in self._memory.parts]
        super().__init__(plan, parts[group.rank], self._memory.common.view(wide))
        self._parts = parts
        self.result_bytes = common if group.rank == 0 else 0
        self.stripe_slices = mine
        self.stripes = [self.received[each] for each in mine]
        # The inputs of all ranks to this rank's stripes: in place, and staged.
        moved = map(_moved, mine, buckets, stages(buckets))
        self._inputs = [
            ([part[piece] for part in parts], [part[stage] for part in parts])
            for piece, stage in zip(mine, moved, strict=True)
        ]
        self._words = AtomicWords(group, 0, (2 * 2 + 2) * group.size)
        self._quiet = Quiet()
        # The counts at the beginning of this call, and this rank's since then.
        self._base = self._contributed = self.summed = self._calls = 0
        self._signature = 1

    def _note_weights(self, weights: Numbers, factors: Numbers) -> None:
        super()._note_weights(weights, factors)
        # Whether the next call has to note them.
        self._weighted = any(weight != 1 for weight in weights)

    def contribute(self, count: int, *, staged: bool = False) -> None:
        """Publish that this rank's inputs of the first ``count`` buckets are ready."""
        if count > self._contributed:
            if weighted := self.weight != 1:
                place = 4 * self._size + self._rank
                self._words.store_unordered(place, bits(self.weight))
                self._words.store_unordered(place + self._size, bits(self.factor))
            self._contributed, word = count, self._base + count << 2
            self._words.store(self._rank, [word | staged << 1 | weighted])

    def offer(self, count: int) -> None:
        """Contribute buckets, and sum those that all ranks have contributed."""
        self.contribute(count)
        words = self._words.read_range(0, self._size)
        least = (min(words) >> 2) - self._base
        while self.summed < min(least, self._count):
            self._sum(words, None)

    def sum_next(self, direct: Array | None = None) -> None:
        """Wait until all ranks have contributed one more bucket, and sum it."""
        size, least = self._size, self._base + self.summed + 1 << 2
        read = self._words.read_range
        if min(words := read(0, size)) < least:
            self._wait(lambda: min(read(0, size)) >= least or self._may_go_on(least))
            words = read(0, size)
        self._sum(words, direct)

    def _may_go_on(self, least: int) -> bool:
        """Look whether all ranks have contributed but those that have died."""
        read = self._words.read_range
        here = self._all_that_live(lambda: read(0, self._size), least)
        if 0 < len(here) < self._size:
            self.counted, self._weighted = here, True
        return bool(here)

    def _sum(self, words: list[int], direct: Array | None) -> None:
        """Sum the next stripe, of which all ranks have contributed the inputs."""
        if not self.summed and (self._weighted or functools.reduce(or_, words) & 1):
            given = self._words.read_range(4 * self._size, 2 * self._size)
            self._read_weights(words, given)
        inputs, out = self._inputs[self.summed], self.stripes[self.summed]
        parts = [inputs[word >> 1 & 1][rank] for rank, word in enumerate(words)]
        factors = self.factors
        if direct is not None:
            parts[self._rank] = direct
            if self.factor != self.weight:
                # It was not multiplied, as it was not copied.
                factors = [*(factors or [1.0] * self._size)]
                factors[self._rank] = self.weight
        if len(self.counted) < self._size:
            parts = [parts[rank] for rank in self.counted]
        self.summed += 1
        if out.size:
            numbers = self.divisor, self._threads, factors
            self._quiet(add_in_order, parts, out, *numbers)

    def _stand_in(self) -> bool:
        """Sum for ranks that have died, if this is the next one; return False."""
        if gone := self._gone():
            size = self._size
            before = [(self._rank - step) % size for step in range(1, size)]
            for rank in itertools.takewhile(gone.__contains__, before):
                done = self._words.read(size + rank) - self._base
                if done <= self._count:
                    self._sum_for(rank, done)
        return False

    def _sum_for(self, rank: int, done: int) -> None:
        """Sum the other stripes of a rank that has summed some, and report all."""
        for bucket in self.buckets[done:]:
            piece = stripe(bucket, rank, self._size, self.received.itemsize)
            parts = [self._parts[each][piece] for each in self.counted]
            numbers = self.divisor, self._threads, self.factors
            self._quiet(add_in_order, parts, self.received[piece], *numbers)
        self._words.store_unordered(self._signatures() + rank, self._signature)
        self._words.store(self._size + rank, [self._base + self._count + 1])

    def report(self, signature: int) -> None:
        """Publish how many stripes this rank has summed; at the end the signature.

        See `OneShot` for why ranks that see this count see the signature of this call.
        """
        self._signature, complete = signature, self.summed == self._count
        if complete:
            place = self._signatures() + self._rank
            self._words.store_unordered(place, signature)
        count = self._base + self.summed + complete
        self._words.store(self._size + self._rank, [count])

    def _signatures(self) -> int:
        """Return where those of this call are."""
        return (2 + self._calls % 2) * self._size

    def wait_until_summed(self, count: int) -> None:
        """Wait until all ranks have summed that many stripes."""
        size, least = self._size, self._base + count
        read = self._words.read_range
        if min(read(size, size)) < least:
            self._wait(lambda: min(read(size, size)) >= least or self._stand_in())

    def end(self, signature: int) -> bool:
        """Wait for all results; return whether all ranks have the same signature."""
        self.wait_until_summed(self._count + 1)
        found = self._words.read_range(self._signatures(), self._size)
        self._base += self._count + 1
        self._contributed = self.summed = 0
        self._calls += 1
        return found == [signature] * self._size

    def late(self) -> list[int]:
        """Return the ranks that this one waits for."""
        size, complete = self._size, self._base + self._count
        words = self._words.read_range(0, 2 * size)
        if (done := self._base + self.summed) < complete:
            # Ranks that wait themselves have not contributed all buckets, either.
            return [r for r in range(size) if words[r] >> 2 <= done]
        return [r for r in range(size) if words[size + r] <= complete]

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        super().free(abandoned=abandoned)
        self._inputs, self.stripes, self._parts = [], [], []
        self._memory.free()
        self._words.free()


class TwoShot(NodeSum):
    """Large arrays on one node: each rank sums a stripe of each bucket.

    The caller's arrays are copied in a pipeline: a bucket is copied in while the one
    before is summed, and the results of the one before that are copied out.

    If calls go on without a rank that has died, all its buckets count, or none: a rank
    publishes them at once, when all are there.
    """

    name = "shared"
    takes_wire_dtype = True
    default_bucket_bytes = 2 << 20

    @classmethod
    def bucket_bytes(cls, case: Case) -> int:
        """Return what stays in the cache, or more if several threads share the work."""
        # One thread is faster where the bytes just copied are still in the cache.
        # Several need pieces that are large enough to be shared.
        if case.cores == 1:
            return cls.default_bucket_bytes
        return min(max(case.nbytes // 4, cls.default_bucket_bytes), _MOST_SHARED)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, plan.group.size)
        self._pipelined, self._shrinks = plan.group.size > 1, plan.shrinks
        memory = self.sent, self.received, self._threads
        self._staging = Staging(plan.layout, plan.buckets, self.stripe_slices, *memory)

    def offer(self, count: int) -> None:
        """Contribute these buckets, and sum those that all ranks have contributed."""
        if not self._shrinks or count == len(self.buckets):
            super().offer(count)

    def finish(self, call: Call) -> bool:
        """Sum the other buckets, and copy in and out meanwhile."""
        count, copies = len(self.buckets), StagedCopies({}, {}, call.out)
        if self._pipelined and (call.inputs or call.out):
            copies = self._staging.select(call.inputs, call.out)
        if self._shrinks:
            copies, call = copies._replace(inputs={}), self._with_all(call)
        if not copies.inputs:
            if call.inputs:
                self.copy_in(call.inputs)
            if call.ready is None:
                self.contribute(count)
        if self.summed or not count:
            self.report(call.signature)
        for number in range(count + 2):
            if number < count:
                self._contribute_next(number, copies, call)
            if self.summed < min(number, count):
                direct = None
                if copies.inputs:
                    direct = self._staging.direct(self.summed, copies.inputs)
                self.sum_next(direct)
                self.report(call.signature)
            if number >= 2:
                self._copy_out(number - 2, copies, call)
        agreed = self.end(call.signature)
        if copies.rest:
            copy(self.results, copies.rest)
        return agreed

    def _with_all(self, call: Call) -> Call:
        """Wait until all inputs of this rank are there."""
        if call.ready is not None:
            for number in range(len(self.buckets)):
                call.ready(number)
        return call._replace(ready=None)

    def _contribute_next(self, number: int, copies: StagedCopies, call: Call) -> None:
        if call.ready is not None:
            call.ready(number)
            self.contribute(number + 1)
        if copies.inputs:
            self._staging.fill(number, copies.inputs, self.scale)
            self.contribute(number + 1, staged=True)

    def _copy_out(self, number: int, copies: StagedCopies, call: Call) -> None:
        """Copy one bucket of the results, when all ranks have summed their stripes."""
        # All ranks have also read the inputs, so that their stage can be filled again.
        if copies.inputs or copies.out or call.reduced is not None:
            self.wait_until_summed(number + 1)
        if copies.inputs or copies.out:
            self._staging.drain(number, copies.out)
        if call.reduced is not None:
            call.reduced(number)

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        self._staging.free()
        super().free(abandoned=abandoned)


def _bytes(elements: slice, itemsize: int) -> slice:
    return slice(elements.start * itemsize, elements.stop * itemsize)


def _moved(piece: slice, bucket: slice, stage: slice) -> slice:
    """Return a piece of a bucket, after the bucket was moved to a stage."""
    shift = stage.start - bucket.start
    return slice(piece.start + shift, piece.stop + shift)

"""Sums of small arrays over the ranks of a node, with one synchronization.

Each rank copies its arrays to shared memory, and then sums those of all ranks.
"""

from __future__ import annotations

from hpcaccum.mpi import AtomicWords, NodeMemory, bits
from hpcaccum.reducer.schedule import Call, Plan, Schedule
from hpcaccum.reducer.staging import copy
from hpcaccum.summation import Quiet, add_at_once


class OneShot(Schedule):
    """Small arrays on one node: every rank sums all of them.

    Shared memory holds two copies of each rank's arrays, used in turn: a rank that is
    one call ahead does not overwrite what a slower rank still sums. The arrays of a
    rank that has died count if it has published the number of the call.

    A call takes microseconds, so `finish` is overridden as a whole, without calls for
    each of its steps.
    """

    name = "shared"
    takes_wire_dtype = True
    default_bucket_bytes = 2 << 20

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        group, layout = plan.group, plan.layout
        self._rank, self._size = group.rank, group.size
        self._memory = NodeMemory(group, [2 * layout.nbytes] * group.size)
        both = [part.view(layout.dtype) for part in self._memory.parts]
        self._copies = [
            [p[: layout.size] for p in both],
            [p[layout.size :] for p in both],
        ]
        self._summed = self._copies.copy()
        self._own = [layout.views(copies[group.rank]) for copies in self._copies]
        # Two blocks, used in turn as the copies are. Of each rank: twice the number of
        # its call, and 1 if its weight is not 1; its signature; and then this weight
        # and its factor.
        self._words = AtomicWords(group, 0, 2 * 4 * group.size)
        # Whether the last call had a weight that is not 1.
        self._weighted = False
        self._quiet, self._calls = Quiet(), 0
        self.window_bytes = 2 * layout.nbytes

    def finish(self, call: Call) -> bool:
        """Copy in, wait for all ranks, sum, and copy out."""
        self._calls += 1
        parity = self._calls % 2
        if call.ready is not None:
            call.ready(0)
        if len(call.inputs) < len(self.arrays):
            self._copies[parity][self._rank][:] = self.sent
        if call.inputs:
            copy(call.inputs, self._own[parity], self.scale)
        if not self._all_agree(call.signature):
            return False
        numbers = self.divisor, self.factors
        self._quiet(add_at_once, self._summed[parity], self.received, *numbers)
        if call.reduced is not None and self.buckets:
            call.reduced(0)
        if call.out:
            copy(self.results, call.out)
        return True

    def _all_agree(self, mine: int) -> bool:
        """Wait for the calls of all ranks; return whether their signatures are mine."""
        # A rank that sees the number of a call also sees its signature and weights:
        # `store` orders that number after them, and `read_range` what is read later
        # after it. Nor does it see those of a later call. A rank writes to this block
        # again two calls later. Before, it has waited for all ranks in the call between
        # the two, which a rank begins after it has read this block.
        words, size, call = self._words, self._size, self._calls
        first, read = call % 2 * 4 * size, words.read_range
        own, here, weighted = first + self._rank, call << 1, self.weight != 1
        words.store_unordered(own + size, mine)
        if weighted:
            words.store_unordered(own + 2 * size, bits(self.weight))
            words.store_unordered(own + 3 * size, bits(self.factor))
        words.store(own, [here | weighted])
        if min(read(first, size)) < here:
            self._wait(
                lambda: min(read(first, size)) >= here or self._may_go_on(first, here)
            )
        found = read(first, 2 * size)
        if found == [here] * size + [mine] * size and not self._weighted:
            return True
        counted, given = self.counted, read(first + 2 * size, 2 * size)
        self._weighted = any(found[rank] & 1 for rank in counted)
        self._read_weights(found, given)
        return {found[size + rank] for rank in counted} == {mine}

    def _may_go_on(self, first: int, least: int) -> bool:
        """Look whether all calls are here but those of ranks that have died."""
        read = self._words.read_range
        here = self._all_that_live(lambda: read(first, self._size), least)
        if 0 < len(here) < self._size:
            parity = self._calls % 2
            self._summed[parity] = [self._copies[parity][rank] for rank in here]
            self.counted = here
        return bool(here)

    def late(self) -> list[int]:
        """Return the ranks that this one waits for."""
        numbers = self._words.read_range(self._calls % 2 * 4 * self._size, self._size)
        return [rank for rank, word in enumerate(numbers) if word >> 1 < self._calls]

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        super().free(abandoned=abandoned)
        self._copies, self._summed, self._own = [], [], []
        self._memory.free()
        self._words.free()

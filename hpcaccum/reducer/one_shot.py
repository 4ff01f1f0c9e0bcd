"""Sums of small arrays over the ranks of a node, with one synchronization.

Each rank copies its arrays to shared memory, and then sums those of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.mpi import AtomicWords, NodeMemory
from hpcaccum.reducer.quiet import Quiet
from hpcaccum.reducer.schedule import Schedule
from hpcaccum.reducer.signature import BITS, agree
from hpcaccum.reducer.staging import copy
from hpcaccum.summation import add_at_once

if TYPE_CHECKING:
    from hpcaccum.reducer.schedule import Call, Case, Plan

# Bytes up to which it is faster that each rank sums everything.
_MOST_BYTES = 32 << 10


class OneShot(Schedule):
    """Small arrays on one node: every rank sums all of them.

    Shared memory holds two copies of each rank's arrays, used in turn: a rank that is
    one call ahead does not overwrite what a slower rank still sums.

    A call takes microseconds, so `finish` is overridden as a whole, without calls for
    each of its steps.
    """

    name = "shared"
    needs_one_node = True
    takes_wire_dtype = True
    default_bucket_bytes = 2 << 20

    @classmethod
    def fits(cls, case: Case) -> bool:
        """Whether the arrays are small; it has no buckets whose size could be set."""
        return case.nbytes <= _MOST_BYTES and case.bucket_bytes is None

    @classmethod
    def preferred(cls, case: Case) -> bool:
        """Whenever it can be used."""
        return True

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
        self._own = [layout.views(copies[group.rank]) for copies in self._copies]
        # A word for each rank: the number of its call, and the signature.
        self._words = AtomicWords(group, 0, group.size)
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
            copy(call.inputs, self._own[parity])
        if not self._all_agree(self._calls << BITS | call.signature):
            return False
        self._quiet(add_at_once, self._copies[parity], self.received, self.divisor)
        if call.reduced is not None and self.buckets:
            call.reduced(0)
        if call.out:
            copy(self.results, call.out)
        return True

    def _all_agree(self, mine: int) -> bool:
        """Wait for the words of all ranks; return whether their signatures are mine."""
        read, size = self._words.read_range, self._size
        self._words.store(self._rank, [mine])
        if read(0, size) == (expected := [mine] * size):
            return True
        least = self._calls << BITS
        self._wait(lambda: min(read(0, size)) >= least)
        return (words := read(0, size)) == expected or agree(words, mine)

    def late(self) -> list[int]:
        """Return the ranks that this one waits for."""
        words = self._words.read_range(0, self._size)
        return [r for r, word in enumerate(words) if word >> BITS < self._calls]

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        super().free(abandoned=abandoned)
        self._copies, self._own = [], []
        self._memory.free()
        self._words.free()

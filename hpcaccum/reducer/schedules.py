"""How a `Reducer` moves gradients: inside a node, between nodes, or by the library.

A schedule works on flat buffers, cut into buckets that all ranks go through in one
order. The reducer tells it how many buckets this rank has ready (`offer`), then that
it has no more (`finish`). Each call also carries a signature, a number that must be
the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import MPI
from hpcaccum.overlap import crossing, overlap
from hpcaccum.reducer.call import copy, copy_in
from hpcaccum.reducer.node_sum import NodeSum
from hpcaccum.reducer.spin_wait import SpinWait
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.layout import Layout
    from hpcaccum.mpi import Group
    from hpcaccum.reducer.call import Call

Array = np.ndarray[Any, Any]

# Bytes of an array, on the average, from which on copying it by pieces pays.
_COARSE = 32 << 10


class Plan(NamedTuple):
    """What all schedules are made from.

    Attributes:
        group: The ranks.
        layout: Of the gradients.
        buckets: Pieces of the buffer, in the order of work.
        wire: Dtype in which sums travel between nodes; None is that of the sums.
    """

    group: Group
    layout: Layout
    buckets: list[slice]
    wire: np.dtype[Any] | None


class Schedule(Protocol):
    """What a reducer needs of a schedule.

    Attributes:
        arrays: This rank's gradients, of the layout's dtype.
        results: The reduction, of the wide dtype.
        sent, received: The flat memory of the two.
        window_bytes: Of gradients in this rank's memory.
        result_bytes: Of results, as far as they lie in this rank's memory.
        divisor: Of the sums of a call; set before it begins.
    """

    arrays: dict[str, Array]
    results: dict[str, Array]
    sent: Array
    received: Array
    window_bytes: int
    result_bytes: int
    divisor: int

    def offer(self, count: int) -> None:
        """Say that the first ``count`` buckets are ready; do what can be done now."""

    def finish(self, call: Call) -> bool:
        """Offer the rest and wait for all; return whether the signatures are one."""

    def late(self) -> list[int] | None:
        """Return the ranks that this one waits for; None if it does not know."""

    def free(self, *, abandoned: bool = False) -> None:
        """Free windows and communicators. Collective.

        Args:
            abandoned: Whether a call was given up. Its messages may still be under
                way; MPI would give them to the next communicator of the same number,
                so communicators that had some are never freed then.
        """


def cut(size: int, most: int) -> list[slice]:
    """Cut a buffer into buckets of at most ``most`` elements, from its end on.

    A backward pass has the gradients of the last layers first.
    """
    return [slice(max(0, end - most), end) for end in range(size, 0, -most)]


class Readiness:
    """How many buckets, from the first on, are ready, as one array after another is."""

    def __init__(self, layout: Layout, buckets: list[slice]) -> None:
        inside = [layout.overlaps(bucket) for bucket in buckets]
        self._touched: dict[str, list[int]] = {name: [] for name in layout}
        for number, arrays in enumerate(inside):
            for name, _, _ in arrays:
                self._touched[name].append(number)
        self._awaited = [len(arrays) for arrays in inside]
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._missing, self._ready = self._awaited.copy(), 0

    def add(self, name: str) -> int:
        """Note that one more array is ready; return how many buckets are."""
        for bucket in self._touched[name]:
            self._missing[bucket] -= 1
        while self._ready < len(self._missing) and self._missing[self._ready] == 0:
            self._ready += 1
        return self._ready


class Agreement:
    """Whether a number is the same on all ranks, found out while data travel.

    Attributes:
        request: Is complete when `reached` can be asked.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, number: int) -> None:
        # They are one if the largest is the smallest.
        self._words = np.array([number, -number], np.int64)
        self.request = comm.Iallreduce(MPI.IN_PLACE, self._words, MPI.MAX)

    @property
    def reached(self) -> bool:
        """Whether all numbers are one."""
        return bool(self._words[0] == -self._words[1])


class Flat:
    """The MPI library's allreduce, bucket by bucket."""

    def __init__(self, plan: Plan) -> None:
        layout = plan.layout
        # MPI pairs collective calls on one communicator by their order alone.
        self._comm = plan.group.comm.Dup()
        self.sent = np.zeros(layout.size, layout.dtype)
        self.received = np.zeros(layout.size, accumulation_dtype(layout.dtype))
        self.arrays, self.results = layout.views(self.sent), layout.views(self.received)
        self.window_bytes, self.result_bytes = self.sent.nbytes, self.received.nbytes
        self._buckets, self.divisor = plan.buckets, 1
        self._requests: list[Any] = []
        self._spin, self._threads = SpinWait(plan.group), plan.group.own_cores

    def offer(self, count: int) -> None:
        """Begin to reduce these buckets."""
        for bucket in self._buckets[len(self._requests) : count]:
            result = self.received[bucket]
            source: Any = self.sent[bucket]
            if source.dtype != result.dtype:
                np.copyto(result, source)
                source = MPI.IN_PLACE
            self._requests.append(self._comm.Iallreduce(source, result))

    def finish(self, call: Call) -> bool:
        """Reduce the other buckets and compare the signatures."""
        copy_in(call.brought, self.arrays, self.sent)
        if call.ready is not None:
            for number in range(len(self._buckets)):
                call.ready(number)
                self.offer(number + 1)
        self.offer(len(self._buckets))
        agreement = Agreement(self._comm, call.signature)
        self._complete(call, agreement.request)
        copy(self.results, call.out)
        return agreement.reached

    def _complete(self, call: Call, last: Any) -> None:
        """Wait for all buckets; for one after the other, if somebody wants them."""
        requests, self._requests = self._requests, []
        if call.arrived is None:
            requests.append(last)
            self._spin(lambda: MPI.Request.Testall(requests), call.wait)
            self._divide(slice(None))
            return
        for number, request in enumerate(requests):
            self._spin(request.Test, call.wait)
            self._divide(self._buckets[number])
            call.arrived(number)
        self._spin(last.Test, call.wait)

    def _divide(self, piece: slice) -> None:
        if self.divisor != 1:
            part = self.received[piece]
            add_in_order([part], part, self.divisor, self._threads)

    def late(self) -> list[int] | None:
        """Return None: the library does not tell."""
        return None

    def free(self, *, abandoned: bool = False) -> None:
        """Free the communicator. Collective."""
        if not abandoned:
            self._comm.Free()


class Shared(NodeSum):
    """All ranks are on one node, and the arrays are large.

    What is copied in goes through a few buckets of the window again and again, which
    stay in the cache: of that copy, memory sees only the reading.
    """

    def __init__(self, plan: Plan) -> None:
        group, stripes = plan.group, plan.group.size
        super().__init__(group, plan.layout, plan.buckets, stripes)
        # Pieces of arrays take microseconds each, which small arrays do not save.
        coarse = plan.layout.nbytes >= _COARSE * len(plan.layout)
        self._by_pieces = coarse and group.size > 1

    def finish(self, call: Call) -> bool:
        """Sum the other buckets, and copy in and out meanwhile."""
        count, sources = len(self.buckets), self._sources(call)
        if not sources:
            copy_in(call.brought, self.arrays, self.sent)
            if call.ready is None:
                self.bring(count)
        if self.summed or not self.buckets:
            self.report(call.signature)
        targets = self._targets(call)
        for number in range(count + 2):
            if call.ready is not None and number < count:
                call.ready(number)
                self.bring(number + 1)
            self._advance(number, sources, targets, call)
            if call.arrived is not None and number >= 2:
                self.read(number - 1, call.wait)
                call.arrived(number - 2)
        agreed = self.end(call.signature, call.wait)
        copy(self.results, {n: a for n, a in call.out.items() if n not in targets})
        return agreed

    def _sources(self, call: Call) -> dict[str, Array]:
        """Return what is to be copied in by pieces: all, or nothing."""
        sources = self._vectors(call.brought) if call.whole else {}
        if not sources or len(sources) < len(call.brought):
            return {}
        # Each piece is read late: until then nothing may be written to it, be it
        # another piece in its stage, a sum, or a result.
        memory = (self.sent, self.received)
        if any(overlap(each, own) for each in sources.values() for own in memory):
            return {}
        # One that is its own target is apart from the other targets, as those are.
        others = [a for n, a in call.brought.items() if call.out.get(n) is not a]
        return {} if any(crossing(others, call.out.values())) else sources

    def _targets(self, call: Call) -> dict[str, Array]:
        """Return where results are to be copied by pieces.

        What others still read, this rank's own memory, is written at the end.
        """
        targets = self._vectors(call.out)
        return {n: a for n, a in targets.items() if not overlap(a, self.sent)}

    def _vectors(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays as vectors, the same memory; only those to copy by pieces."""
        if not self._by_pieces:
            return {}
        items = arrays.items()
        return {
            name: a.reshape(-1)
            for name, a in items
            if type(a) is np.ndarray and a.flags.c_contiguous
        }

    def _advance(
        self,
        number: int,
        sources: Mapping[str, Array],
        targets: Mapping[str, Array],
        call: Call,
    ) -> None:
        """Bring one bucket, sum the one before, read the one before that."""
        count = len(self.buckets)
        if sources and number < count:
            self.fill(number, sources)
            self.bring(number + 1, staged=True)
        if self.summed < min(number, count):
            self.sum_next(call.wait, sources)
            self.report(call.signature)
        if number >= 2 and (sources or targets):
            # Then the place of this bucket is free again, too.
            self.read(number - 1, call.wait)
            self.drain(number - 2, targets)

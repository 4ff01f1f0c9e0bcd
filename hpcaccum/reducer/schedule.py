"""The contract of a schedule: how a `Reducer` moves and sums its arrays.

A schedule works on two flat buffers, one of this rank's arrays and one of the results.
They are cut into buckets, which all ranks process in the same order.

To add a schedule, write a subclass in a file of its own and add it to the list in
`selection`. A subclass of `MessageSchedule` overrides

- `Schedule.offer`: begin to reduce the buckets that are ready, without waiting;
- `MessageSchedule.collect`: wait until a bucket is reduced, which has what each rank
  sends times its `Schedule.factor`;

and states its properties as class variables. `Schedule` copies arrays in and out, and
calls these two in turn. A schedule without messages overrides `Schedule.complete`. One
that reads or writes the caller's arrays bucket by bucket, while others are reduced,
overrides `Schedule.finish`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group, duplicate, keep, number_of
from hpcaccum.overlap import overlap
from hpcaccum.reducer import staging
from hpcaccum.reducer.recursive_doubling import RecursiveDoubling
from hpcaccum.summation import add_in_order, copy_pieces

# About a millisecond where each rank has its own core; where ranks share cores, only a
# few, which leave the core to the others.
_LOOKS, _CROWDED_LOOKS = 3000, 100


class Case(NamedTuple):
    """What a schedule is selected for; the same on all ranks.

    ``cores`` is the least that a rank has for itself, ``nbytes`` the size of the arrays
    of one rank, ``bucket_bytes`` what the user has set.
    """

    ranks: int
    nodes: int
    cores: int
    nbytes: int
    wire_dtype: np.dtype[Any] | None
    bucket_bytes: int | None
    cuda_aware: bool


class Plan(NamedTuple):
    """What a schedule is made from; whether calls go on without ranks that have died.

    ``buckets`` are pieces of the buffer, in the order of work; ``wire_dtype`` is the
    dtype in which sums travel between nodes, None for theirs.
    """

    group: Group
    layout: Layout
    buckets: list[slice]
    wire_dtype: np.dtype[Any] | None
    wait: SpinWait
    shrinks: bool = False

    @property
    def gone(self) -> Callable[[], frozenset[int]]:
        """What returns the ranks for which no call waits any more."""
        return (lambda: self.group.dead) if self.shrinks else frozenset


def cut(size: int, most: int) -> list[slice]:
    """Cut a buffer into buckets of at most ``most`` elements, from its end on.

    A backward pass computes the gradients of the last layers first.
    """
    return [slice(max(0, end - most), end) for end in range(size, 0, -most)]


class Readiness:
    """Counts how many buckets, from the first on, consist of ready arrays only."""

    def __init__(self, layout: Layout, buckets: list[slice]) -> None:
        inside = [layout.overlaps(bucket) for bucket in buckets]
        self._touched: dict[str, list[int]] = {name: [] for name in layout}
        for number, arrays in enumerate(inside):
            for name, _, _ in arrays:
                self._touched[name].append(number)
        self._awaited = [len(arrays) for arrays in inside]
        self.reset()

    def reset(self) -> None:
        """Make no array ready."""
        self._missing, self._ready = self._awaited.copy(), 0

    def add(self, name: str) -> int:
        """Make one more array ready; return how many buckets are."""
        for bucket in self._touched[name]:
            self._missing[bucket] -= 1
        while self._ready < len(self._missing) and self._missing[self._ready] == 0:
            self._ready += 1
        return self._ready


class Call(NamedTuple):
    """One reduction, as this rank makes it; all ranks must have the same signature.

    Attributes:
        inputs: Arrays to copy in. What is missing lies in `Schedule.arrays` already.
        out: Arrays to copy results to.
        ready: Waits until the inputs of a bucket, by its number, are in
            `Schedule.sent`; called in order. None if they all are.
        reduced: Called with the number of each bucket whose results are in
            `Schedule.received`, in order.
    """

    signature: int
    inputs: Mapping[str, Array]
    out: Mapping[str, Array]
    ready: Callable[[int], None] | None = None
    reduced: Callable[[int], None] | None = None


class SpinWait:
    """Waits for other ranks in a call: spins, and then calls ``wait``. Collective.

    ``wait`` has a time limit, and returns when what it is given does not return None.
    """

    def __init__(self, group: Group, wait: Callable[..., None]) -> None:
        cores = group.node.allgather(os.sched_getaffinity(0))
        crowded = len(set().union(*cores)) < group.node.size
        self._looks = _CROWDED_LOOKS if crowded else _LOOKS
        yields = crowded or not group.single_node
        self._between = os.sched_yield if yields else None
        self._wait = wait
        self._progress: Callable[[], object] | None = None
        self._moves_data = False

    def moving_data(self, progress: Callable[[], object] | None = None) -> SpinWait:
        """Return one for what moves data, such as tests of MPI's requests.

        It calls ``progress`` before each look: a rank that only reads memory makes no
        progress in MPI, which ranks of other nodes may depend on.
        """
        other = copy.copy(self)
        other._moves_data, other._progress = True, progress
        if progress is not None:
            # Beside the time of a message to another node, yielding costs little.
            other._between = os.sched_yield
        return other

    def __call__(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` returns True."""
        progress, between = self._progress, self._between
        # A deadline costs microseconds, which most waits do not take.
        for _ in range(self._looks):
            if progress is not None:
                progress()
            if ready():
                return
            if between is not None:
                between()

        def look() -> bool | None:
            if progress is not None:
                progress()
            return ready() or None

        self._wait(look, moves_data=self._moves_data)


Numbers = Sequence[float]


class Schedule:
    """Moves and sums the arrays of one rank. Collective.

    Attributes:
        name: By which users select it; several schedules may share one.
        takes_wire_dtype: Whether sums that travel between nodes can be narrowed, or
            none do.
        takes_device_memory: Whether it gives device memory to MPI, for
            ``cuda_aware=True``. It then overrides `reduce_device`.
        device_only: Whether it reduces arrays on the device only, without MPI. It then
            overrides `reduce_device` and `check_usable`.
        default_bucket_bytes: What `bucket_bytes` returns, unless it is overridden.
        sent, arrays: This rank's arrays, flat and by name, of the layout's dtype.
        received, results: The reduced arrays, of the dtype of sums.
        window_bytes, result_bytes: Bytes of these in this rank's memory.
        weight: Of this rank's arrays in a call, which it multiplies: as `scale` while
            they are copied to `sent`, or as `factor` in the sum. The other one is 1.
        mean: Whether the sums of a call are divided by the sum of the weights.
        total_weight: Sum of the weights that the last call has counted.
        divisor: Of its sums.
        factors: Of the arrays that it has summed, 1 for those that have been multiplied
            by their weight before; empty if none are needed.
        counted: The ranks whose arrays the last call has summed.
        buckets: Pieces of the buffers, in the order of work.
        failure: Why this rank could not make the last call, which is raised on all
            ranks; None if nothing failed here.
    """

    name: ClassVar[str]
    takes_wire_dtype: ClassVar[bool] = False
    takes_device_memory: ClassVar[bool] = False
    device_only: ClassVar[bool] = False
    default_bucket_bytes: ClassVar[int] = 8 << 20
    failure: Exception | None = None

    @classmethod
    def bucket_bytes(cls, case: Case) -> int:
        """Return the bytes of a bucket, if the user sets none."""
        return cls.default_bucket_bytes

    def __init__(
        self, plan: Plan, sent: Array | None = None, received: Array | None = None
    ) -> None:
        layout, wide = plan.layout, accumulation_dtype(plan.layout.dtype)
        self.sent = np.zeros(layout.size, layout.dtype) if sent is None else sent
        self.received = np.zeros(layout.size, wide) if received is None else received
        results = self.received.view()
        results.flags.writeable = False
        self.arrays: Mapping[str, Array] = layout.views(self.sent)
        self.results: Mapping[str, Array] = MappingProxyType(layout.views(results))
        self.window_bytes, self.result_bytes = self.sent.nbytes, self.received.nbytes
        self.buckets = plan.buckets
        self.counted: Sequence[int] = range(plan.group.size)
        self.prepare(1.0, mean=False, scales=False)
        self._wait, self._gone = plan.wait, plan.gone
        self._threads = plan.group.own_cores
        self._readiness = Readiness(layout, plan.buckets)

    # Before a call

    def prepare(self, weight: float, *, mean: bool, scales: bool) -> None:
        """Set the weight of this rank, and the kind of reduction, of the next call.

        If it ``scales``, all its arrays are copied in, and multiplied meanwhile.
        """
        self.weight, self.mean = weight, mean
        self.scale, self.factor = (weight, 1.0) if scales else (1.0, weight)
        ones = [1.0] * len(self.counted)
        self._note_weights(ones, ones)

    def _note_weights(self, weights: Numbers, factors: Numbers) -> None:
        """Note what the ranks that count have set; at first, all numbers are 1."""
        self.total_weight = sum(weights)
        self.factors, self.divisor = self._combine(weights, factors)

    def _combine(self, weights: Numbers, factors: Numbers) -> tuple[Numbers, float]:
        """Return the factors of arrays with these weights, and the divisor."""
        if self.mean and factors == weights and len({*weights}) == 1:
            # A mean of arrays with equal weights needs no factors.
            return (), float(len(weights))
        divisor = sum(weights) if self.mean else 1.0
        return () if {*factors} == {1} else factors, divisor

    def _read_weights(self, words: list[int], given: list[int]) -> None:
        """Note the numbers that ranks have ``given``; if their words are even, 1."""
        half = len(given) // 2
        weights, factors = (
            [number_of(part[rank]) if words[rank] & 1 else 1.0 for rank in self.counted]
            for part in (given[:half], given[half:])
        )
        self._note_weights(weights, factors)

    def _all_that_live(self, read: Callable[[], list[int]], least: int) -> list[int]:
        """Return the ranks whose words have a value; none while another lives."""
        # Before the words: a rank may have written its own, and then died.
        if not (dead := self._gone()):
            return []
        words = read()
        here = [rank for rank, word in enumerate(words) if word >= least]
        return here if len({*here} | dead) == len(words) else []

    def copy_in(self, inputs: Mapping[str, Array]) -> None:
        """Copy arrays to `arrays`, times `scale`.

        One that is itself a view of `sent` is read before any array is written, even if
        it is the only one: NumPy 2.4 computes ``x[512:1012] = x[250:1250:2]`` wrongly.
        """
        share, plain, memory = np.may_share_memory, np.ndarray, self.sent
        for name, array in inputs.items():
            if (type(array) is not plain or share(array, memory)) and overlap(
                array, memory
            ):
                inputs = {**inputs, name: array.copy()}
        staging.copy(inputs, self.arrays, self.scale)

    def add(self, name: str) -> None:
        """Offer the buckets that are ready now that one more of `arrays` is."""
        self.offer(self._readiness.add(name))

    def reset(self) -> None:
        """Forget which arrays are ready, after a call."""
        self._readiness.reset()

    def offer(self, count: int) -> None:
        """Do what can be done now that the first ``count`` buckets are in `sent`.

        Called with counts that never decrease during a call, at last with all buckets.
        Must not wait: other ranks may compute. Does nothing by default.
        """

    # The call

    def finish(self, call: Call) -> bool:
        """Reduce the rest and wait for it; return whether all ranks make this call."""
        if call.inputs:
            self.copy_in(call.inputs)
        if call.ready is not None:
            for number in range(len(self.buckets)):
                call.ready(number)
                self.offer(number + 1)
        self.offer(len(self.buckets))
        agreed = self.complete(call)
        if agreed and call.out:
            staging.copy(self.results, call.out)
        return agreed

    def complete(self, call: Call) -> bool:
        """Wait until all buckets are reduced; return whether signatures agree.

        Call ``call.reduced`` for each bucket, if it is not None. All ranks must return,
        also if signatures differ: they then raise the same error.
        """
        raise NotImplementedError

    def reduce_device(self, signature: int, buffer: Any) -> bool:
        """Sum a flat buffer on the device in place; do as `finish` otherwise.

        Its contents are queued on the current stream, as is what reads the sums.
        """
        raise NotImplementedError

    def check_usable(self) -> None:
        """Raise an error if no call can succeed any more."""

    def late(self) -> list[int] | None:
        """Return the ranks that this one waits for; None if it cannot know."""
        return None

    def _weigh(self, piece: slice) -> None:
        """Set a piece of `received` to that of `sent`, times `factor`."""
        pair = self.received[piece], self.sent[piece]
        copy_pieces([pair], self._threads, self.factor)

    def _divide(self, piece: slice) -> None:
        """Divide a piece of `received` by `divisor`."""
        if self.divisor != 1:
            part = self.received[piece]
            add_in_order([part], part, self.divisor, self._threads)

    # The end

    def free(self, *, abandoned: bool = False) -> None:
        """Free windows and communicators, and release the memory. Collective.

        If ``abandoned``, a rank has left a call before it was complete.
        """
        # Arrays that the caller holds keep their memory.
        self.sent = self.received = np.empty(0, self.received.dtype)
        self.arrays, self.results = {}, {}


class MessageSchedule(Schedule):
    """A schedule that exchanges signatures by messages.

    Its collective calls use `_comm`, on which MPI pairs them by their order alone, that
    of the buckets.

    Args:
        plan, sent, received: See `Schedule`.
        sums: How many numbers in `received` travel together with the signatures.
    """

    def __init__(
        self,
        plan: Plan,
        sent: Array | None = None,
        received: Array | None = None,
        *,
        sums: int = 0,
    ) -> None:
        self._comm = duplicate(plan.group.comm)
        dtype = accumulation_dtype(plan.layout.dtype)
        self._exchange = RecursiveDoubling(self._comm, sums, dtype)
        super().__init__(plan, sent, self._exchange.vector if sums else received)
        self._wait = plan.wait.moving_data()

    def collect(self, number: int) -> None:
        """Wait, with `_wait`, until the mean or sum of a bucket is in `received`.

        Called for each bucket in order, after all were offered.
        """
        raise NotImplementedError

    def complete(self, call: Call) -> bool:
        """Compare the signatures, and collect all buckets, which travel meanwhile."""
        agreed = self._agree(call.signature)
        self._collect_all(call)
        return agreed

    def _collect_all(self, call: Call) -> None:
        for number in range(len(self.buckets)):
            self.collect(number)
            if call.reduced is not None:
                call.reduced(number)

    def _agree(self, number: int, meanwhile: Callable[[], bool] | None = None) -> bool:
        """Return whether a number is the same on all ranks; add their weights."""
        exchange = self._exchange
        exchange.begin(number, self.weight)
        test = exchange.test
        # Until both return True; neither goes on unless it is tested.
        self._wait(test if meanwhile is None else lambda: meanwhile() & test())
        self.total_weight = exchange.weight
        self.divisor = exchange.weight if self.mean else 1.0
        return exchange.agreed

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        if abandoned:
            # MPI may still read and write the memory of a call that was not complete.
            keep(self)
            return
        super().free()
        self._exchange.free()
        self._comm.Free()

"""Variants of one operation: each is verified, then all are timed in turns.

As they take turns, the ratios between them hold on a busy machine, too. All ranks take
part in every decision.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hpcaccum.machine import free_memory
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum.bench.links import Links
    from hpcaccum.bench.references import Gloo
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group

    Run = Callable[[int], list[float]]

# Seconds of one sample at least, far above the cost of reading the clock.
_SAMPLE = 200e-6
_MAX_INNER = 1000
# A variant is measured well if both halves of at least so many samples agree: the
# largest relative difference of their medians.
_MIN_SAMPLES, _AGREEMENT = 10, 0.02
# Samples that are taken even if the time is up.
_LEAST = 3
# Samples from which the 99th percentile is not simply the maximum.
_P99_SAMPLES = 100
# The names of the kinds that define the floors of memory and of the network.
COPY, EXCHANGE = "copy", "exchange"


class WrongAnswerError(RuntimeError):
    """Raised if an operation gives a wrong result."""


class Times(NamedTuple):
    """Seconds of one operation, over all ranks and repeats.

    Attributes:
        samples: Their number.
        min, median, max: In seconds.
        p99: The 99th percentile; None of fewer than 100 samples.
        spread: The upper quartile minus the lower one.
    """

    samples: int
    min: float
    median: float
    p99: float | None
    max: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Return the statistics of at least one sample."""
        percentiles = np.percentile(seconds, [0, 25, 50, 75, 99, 100])
        low, lower, median, upper, p99, high = map(float, percentiles)
        known = p99 if len(seconds) >= _P99_SAMPLES else None
        return cls(len(seconds), low, median, known, high, upper - lower)


@dataclass(frozen=True)
class Kind:
    """One variant of an operation.

    Attributes:
        name: Short, for a table.
        run: Performs the operation a number of times. Returns samples, each in seconds
            per operation; none on a rank that only assists. Collective.
        check: Raises WrongAnswerError on this rank if the last result was wrong.
        raw: The name of the kind that does the same with a single MPI call.
        reference: Whether this is not hpcaccum, but what it is compared with.
        moves: Bytes that all ranks together must read and write in memory; 0 for no
            floor.
        crosses: Bytes that must cross the busiest link between nodes, in one direction;
            0 for no floor.
        bus: Bus bandwidth over algorithm bandwidth, as nccl-tests define them; 0 where
            a bandwidth has no meaning.
        figures: Returns more numbers, from the medians of all kinds.
    """

    name: str
    run: Run
    check: Callable[[], None] = lambda: None
    raw: str | None = None
    reference: bool = False
    moves: float = 0.0
    crosses: float = 0.0
    bus: float = 1.0
    figures: Callable[[Mapping[str, float]], dict[str, float]] = lambda _: {}


@dataclass(frozen=True)
class Conditions:
    """How a case is measured, besides the ranks and the size.

    Attributes:
        seconds: Approximate time for each size.
        gloo: torch.distributed, if it is measured as well.
        links: Counts the bytes between nodes, if they are measured.
    """

    seconds: float
    gloo: Gloo | None = None
    links: Links | None = None


class Case(Protocol):
    """The kinds of one benchmark at one size.

    Attributes:
        memory: How much it needs; has ``missing(group, nbytes)``, as `Memory`.
        least_ranks: Minimum number of ranks.
        kinds: In the order of the table. If one is named ``"copy"``, it is a plain copy
            of ``nbytes`` by all ranks at once, and defines the floor of memory. If one
            is named ``"exchange"``, ``nbytes`` cross each link in each direction, and
            it defines the floor of the network.
    """

    memory: ClassVar[Any]
    least_ranks: ClassVar[int]
    kinds: list[Kind]

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        """Prepare one size. Collective."""

    def forget(self) -> None:
        """Overwrite all results, so that only a new one is right. Collective."""

    def free(self) -> None:
        """Free everything. Collective."""


@dataclass(frozen=True)
class Row:
    """One kind at one size: a line of the table, and of the JSON file.

    Attributes:
        benchmark, name, bytes: What was measured.
        raw: What ``vs_mpi`` compares with.
        reference: Whether this is not hpcaccum, but what it is compared with.
        samples: Over all ranks.
        min_us, median_us, max_us: Of one operation, over ranks and repeats.
        p99_us: The 99th percentile; None of fewer than 100 samples.
        algbw, busbw: In GB/s: bytes over the median; that times nccl-tests' factor.
        floor_us: Time to move the bytes at the rate of a copy by all ranks or, between
            nodes, at that of a plain exchange.
        vs_mpi: Time of the raw call over this time; above 1 is faster.
        vs_floor: This time over the floor; 1 is optimal.
        figures: More numbers, by name.
        spread_us: The upper quartile of the times minus the lower one; None if unknown.
    """

    benchmark: str
    name: str
    bytes: int
    raw: str | None
    reference: bool
    samples: int
    min_us: float
    median_us: float
    p99_us: float | None
    max_us: float
    algbw: float | None
    busbw: float | None
    floor_us: float | None
    vs_mpi: float | None
    vs_floor: float | None
    figures: dict[str, float]
    spread_us: float | None = None


def repeated(operation: Callable[[], object]) -> Run:
    """Return a `Kind.run` that repeats an operation."""

    def run(inner: int) -> list[float]:
        begun = time.perf_counter()
        for _ in range(inner):
            operation()
        return [(time.perf_counter() - begun) / inner]

    return run


def apart(
    before: Callable[[], object],
    operation: Callable[[], object],
    after: Callable[[], object],
) -> Run:
    """Return a `Kind.run` that times an operation without its preparation and end."""

    def run(inner: int) -> list[float]:
        seconds = 0.0
        for _ in range(inner):
            before()
            begun = time.perf_counter()
            operation()
            seconds += time.perf_counter() - begun
            after()
        return [seconds / inner]

    return run


def check_equal(actual: Array, expected: Any) -> None:
    """Raise WrongAnswerError if elements differ; show the first of them."""
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        first = wrong[0]
        wanted = np.broadcast_to(expected, actual.shape).flat[first]
        raise WrongAnswerError(
            f"{wrong.size} of {actual.size} elements are wrong: number {first} is "
            f"{actual.flat[first]}, should be {wanted}"
        )


def settled(seconds: Sequence[float]) -> bool:
    """Whether more samples would change the median little."""
    if not seconds:
        return True
    if len(seconds) < _MIN_SAMPLES:
        return False
    half = len(seconds) // 2
    early, late = np.median(seconds[:half]), np.median(seconds[half:])
    return bool(abs(early - late) <= _AGREEMENT * late)


class Measurement:
    """Times all kinds of a case in turns. Collective.

    Args:
        group: The ranks.
        what: Begins the messages.
        case: Its kinds are timed.
        seconds: When to stop if the times do not settle.
    """

    def __init__(self, group: Group, what: str, case: Case, seconds: float) -> None:
        self._group, self._what, self._case = group, what, case
        self._limit = seconds

    def __call__(self) -> dict[str, Times]:
        """Verify, then time; return the statistics of each kind."""
        inner = {kind.name: self._prepare(kind) for kind in self._case.kinds}
        mine = self._samples(inner)
        everybody = self._group.allgather(mine, self._what)
        return {
            name: Times.of([t for theirs in everybody for t in theirs[name]])
            for name in mine
        }

    def _prepare(self, kind: Kind) -> int:
        """Verify one kind; return how many operations a sample has."""
        self._case.forget()
        kind.run(1)
        # The result of one rank may depend on the run of another.
        self._group.comm.Barrier()
        failure = None
        try:
            kind.check()
        except WrongAnswerError as error:
            failure = WrongAnswerError(f"{self._what}, {kind.name}: {error}")
        self._group.raise_together(f"{self._what}, {kind.name}", failure)
        # The first run had cold caches; this one estimates the time.
        self._group.comm.Barrier()
        mine = max(kind.run(1), default=0.0)
        longest: float = max(self._group.comm.allgather(mine))
        return min(math.ceil(_SAMPLE / max(longest, 1e-9)), _MAX_INNER)

    def _sample(self, kind: Kind, inner: int) -> list[float]:
        # Do not measure what the previous kind left in the cache.
        kind.run(1)
        self._group.comm.Barrier()
        return kind.run(inner)

    def _samples(self, inner: Mapping[str, int]) -> dict[str, list[float]]:
        begun, kinds = time.perf_counter(), self._case.kinds
        samples: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        for turn in itertools.count(1):
            # In another order each time, as a kind may slow down the next one.
            first = turn % len(kinds)
            for kind in [*kinds[first:], *kinds[:first]]:
                samples[kind.name] += self._sample(kind, inner[kind.name])
            over = time.perf_counter() - begun >= self._limit
            if turn >= _LEAST and self._enough(samples, over):
                break
        return samples

    def _enough(self, samples: Mapping[str, Sequence[float]], over: bool) -> bool:
        """Whether the time is up on one rank, or all times are settled on all."""
        unsettled = not all(settled(each) for each in samples.values())
        votes = np.array([over, unsettled], np.int32)
        self._group.comm.Allreduce(MPI.IN_PLACE, votes, MPI.MAX)
        return bool(votes[0]) or not votes[1]


def rows(
    benchmark: str, nbytes: int, ranks: int, kinds: Sequence[Kind], times: Any
) -> list[Row]:
    """Return the rows of one size."""
    medians = {name: each.median for name, each in times.items()}
    # A copy reads and writes each byte.
    rate = 2 * nbytes * ranks / medians[COPY] if COPY in medians else math.inf
    wire = nbytes / medians[EXCHANGE] if EXCHANGE in medians else math.inf
    made = []
    for kind in kinds:
        each: Times = times[kind.name]
        floor = kind.moves / rate + kind.crosses / wire
        bandwidth = nbytes / max(each.median, 1e-9) / 1e9
        row = Row(
            benchmark=benchmark,
            name=kind.name,
            bytes=nbytes,
            raw=kind.raw,
            reference=kind.reference,
            samples=each.samples,
            min_us=1e6 * each.min,
            median_us=1e6 * each.median,
            p99_us=None if each.p99 is None else 1e6 * each.p99,
            max_us=1e6 * each.max,
            algbw=bandwidth if kind.bus else None,
            busbw=bandwidth * kind.bus or None,
            floor_us=1e6 * floor or None,
            vs_mpi=medians[kind.raw] / each.median if kind.raw else None,
            vs_floor=each.median / floor if floor else None,
            figures=kind.figures(medians),
            spread_us=1e6 * each.spread,
        )
        made.append(row)
    return made


def sum_everywhere(nodes: int) -> float:
    """Return the floor of a sum over all ranks that all need: 2 (N - 1) / N.

    Every node sends what the others sum, (N - 1) / N of its gradients' sum, and
    receives the sums of the others, (N - 1) / N of the result. So it is for an
    allreduce, and for an optimizer with a quorum of all ranks whose parameters are
    divided among the nodes. If one node holds all parameters, N - 1 sums enter it, and
    as many copies of the parameters leave it: N - 1, which is more from three nodes on.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
        workstations, 2009.
    """
    return 2 * (nodes - 1) / nodes


def to_or_from_one(nodes: int) -> float:
    """Return the floor of a sum that one rank needs, or of its vector for all: 1.

    Every node but one must send its sum, or receive the vector. In a chain of nodes no
    link carries more.
    """
    return float(nodes > 1)


def update_each(nodes: int, ranks: int) -> float:
    """Return the floor if each gradient is an update: (r + 1) (N - 1) / N, r = n / N.

    Rules such as Adam need each gradient separately, in the order of the updates. If
    the parameters are divided among the nodes, (N - 1) / N of each of the r gradients
    leaves its node. Then the nodes need the parameters, once if the ranks of a node
    wait for their updates together: (N - 1) / N. If each rank is sent those of its own
    update, it is r times as much, in all 2 r (N - 1) / N. For 4 nodes with 2 ranks:
    2.25 and 3. If one node holds all parameters, (N - 1) r gradients enter it: 6.
    """
    return (ranks / nodes + 1) * (nodes - 1) / nodes


_SHM = "/dev/shm"
# The rest is left to other programs and to libraries.
_SPARE = 0.9


class Memory(NamedTuple):
    """What a benchmark needs, in multiples of its size.

    Attributes:
        shared: Shared memory of each rank.
        shared_first: Shared memory of rank 0, in addition.
        shared_all: Shared memory of rank 0, in addition, times the number of ranks.
        private: Private memory of each rank.
    """

    shared: float
    shared_first: float = 0
    shared_all: float = 0
    private: float = 0

    def missing(self, group: Group, nbytes: int) -> str | None:
        """Return what is missing on a node for this size, or None. Collective."""
        shared = self.shared * nbytes
        if group.rank == 0:
            shared += (self.shared_first + self.shared_all * group.size) * nbytes
        private = self.private * nbytes
        needed = group.node.allgather((shared, private))
        shared, private = map(sum, zip(*needed, strict=True))
        host = MPI.Get_processor_name()
        # Shared memory is memory, too.
        problem = shortage(f"{_SHM} on {host}", shared, _free_shared()) or shortage(
            f"memory on {host}", shared + private, free_memory()
        )
        return first_of(group, problem)


def shortage(where: str, wanted: float, free: float) -> str | None:
    """Return what is missing if ``wanted`` bytes do not fit, or None."""
    if wanted <= _SPARE * free:
        return None
    return f"needs {wanted / 2**30:.1f} GiB of {where}, {free / 2**30:.1f} GiB are free"


def first_of(group: Group, problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, or None. Collective."""
    return next(filter(None, group.allgather(problem, "memory")), None)


def _free_shared() -> float:
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHM)
        return float(state.f_bavail * state.f_frsize)
    return float("inf")

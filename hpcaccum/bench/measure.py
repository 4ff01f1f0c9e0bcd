"""The machinery: several ways to do one thing, verified, then timed in turns.

All ways take turns, so that ratios between them hold whatever else the machine does
meanwhile. All ranks take part in every decision.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum.mpi import Group

    Run = Callable[[int], list[float]]

Array = np.ndarray[Any, Any]

# Seconds that one sample lasts at least, far above what the clock itself costs.
_SAMPLE = 200e-6
_MAX_INNER = 1000
# A way is measured well when its halves, of so many samples, agree so far.
_MIN_SAMPLES, _AGREEMENT = 10, 0.02
# Samples that are taken even if the time is over.
_LEAST = 3


class WrongAnswerError(RuntimeError):
    """What was to be measured does not compute what it should."""


class Times(NamedTuple):
    """Seconds of one operation, over all ranks and repeats."""

    samples: int
    min: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Return the statistics of samples, at least one."""
        low, median, p99, high = np.percentile(seconds, [0, 50, 99, 100])
        return cls(len(seconds), float(low), float(median), float(p99), float(high))


@dataclass(frozen=True)
class Kind:
    """One way to do something.

    Attributes:
        name: Short, for a table.
        run: Does it a number of times; returns samples, seconds for one operation each,
            or none on a rank that only helps. Collective.
        check: Raises WrongAnswerError on this rank if the last run was wrong.
        raw: The name of the kind that does the same with a single MPI call.
        reference: Whether this is not ours, but what ours is compared with.
        moves: Bytes that all ranks together must move through memory, reads and writes;
            0 for no floor.
        bus: Bus bandwidth over algorithm bandwidth, as nccl-tests define them; 0 where
            a bandwidth says nothing.
        figures: More numbers, from the medians of all kinds.
    """

    name: str
    run: Run
    check: Callable[[], None] = lambda: None
    raw: str | None = None
    reference: bool = False
    moves: float = 0.0
    bus: float = 1.0
    figures: Callable[[Mapping[str, float]], dict[str, float]] = lambda _: {}


class Case(Protocol):
    """What is measured at one size.

    Attributes:
        memory: What it needs; has ``missing(group, nbytes)``, as `Memory`.
        least_ranks: Fewer cannot do it.
        kinds: In the order of the table. The one called ``"copy"``, if any, is a plain
            copy of ``nbytes`` by all ranks at once: the measure of the floor.
    """

    memory: ClassVar[Any]
    least_ranks: ClassVar[int]
    kinds: list[Kind]

    def __init__(self, group: Group, nbytes: int, conditions: Any) -> None:
        """Make it for one size. Collective."""

    def forget(self) -> None:
        """Spoil all answers, so that only a new one is right. Collective."""

    def free(self) -> None:
        """Free what was made. Collective."""


@dataclass(frozen=True)
class Row:
    """One way at one size: a line of the table, and of the JSON file.

    Attributes:
        benchmark, name, bytes: What was measured.
        raw: What ``vs_mpi`` compares with.
        reference: Whether this is not ours, but what ours is compared with.
        samples: Over all ranks.
        min_us, median_us, p99_us, max_us: Of one operation, over ranks and repeats.
        algbw, busbw: GB/s: bytes over the median, and that times nccl-tests' factor.
        floor_us: What moving the bytes takes, at the rate of a copy by all ranks.
        vs_mpi: Time of the raw call over ours; more than 1 is faster.
        vs_floor: Our time over the floor; 1 is perfect.
        figures: More numbers, by name.
    """

    benchmark: str
    name: str
    bytes: int
    raw: str | None
    reference: bool
    samples: int
    min_us: float
    median_us: float
    p99_us: float
    max_us: float
    algbw: float | None
    busbw: float | None
    floor_us: float | None
    vs_mpi: float | None
    vs_floor: float | None
    figures: dict[str, float]


def repeated(operation: Callable[[], object]) -> Run:
    """Return a `Kind.run` that does something again and again."""

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
    """Return a `Kind.run` that times something without what must surround it."""

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
    """Raise WrongAnswerError, with the first element that is not as it should be."""
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        first = wrong[0]
        wanted = np.broadcast_to(expected, actual.shape).flat[first]
        raise WrongAnswerError(
            f"{wrong.size} of {actual.size} elements are wrong: number {first} is "
            f"{actual.flat[first]}, should be {wanted}"
        )


def settled(seconds: Sequence[float]) -> bool:
    """Whether more samples would hardly change the median."""
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
        case: What to time.
        seconds: When to stop if the times do not settle.
    """

    def __init__(self, group: Group, what: str, case: Case, seconds: float) -> None:
        self._group, self._what, self._case = group, what, case
        self._limit = seconds

    def __call__(self) -> dict[str, Times]:
        """Verify, then time; return the statistics of each kind.

        Raises:
            WrongAnswerError: On this rank if its answer is wrong, else a RuntimeError
                that says whose is.
        """
        inner = {kind.name: self._prepare(kind) for kind in self._case.kinds}
        mine = self._samples(inner)
        everybody = self._group.allgather(mine, self._what)
        return {
            name: Times.of([t for theirs in everybody for t in theirs[name]])
            for name in mine
        }

    def _prepare(self, kind: Kind) -> int:
        """Verify one kind; return how often a sample must repeat it."""
        self._case.forget()
        kind.run(1)
        # One rank's answer may be another one's doing.
        self._group.comm.Barrier()
        failure = None
        try:
            kind.check()
        except WrongAnswerError as error:
            failure = WrongAnswerError(f"{self._what}, {kind.name}: {error}")
        self._group.raise_together(f"{self._what}, {kind.name}", failure)
        # The first run found nothing in its place; this one tells the time.
        self._group.comm.Barrier()
        mine = max(kind.run(1), default=0.0)
        longest: float = self._group.comm.allreduce(mine, MPI.MAX)
        return min(math.ceil(_SAMPLE / max(longest, 1e-9)), _MAX_INNER)

    def _sample(self, kind: Kind, inner: int) -> list[float]:
        # What the kind before it left in the cache is not what is measured.
        kind.run(1)
        self._group.comm.Barrier()
        return kind.run(inner)

    def _samples(self, inner: Mapping[str, int]) -> dict[str, list[float]]:
        begun, kinds = time.perf_counter(), self._case.kinds
        samples: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        for turn in itertools.count(1):
            # In another order each time, as each kind may suffer from the one before.
            first = turn % len(kinds)
            for kind in [*kinds[first:], *kinds[:first]]:
                samples[kind.name] += self._sample(kind, inner[kind.name])
            over = time.perf_counter() - begun >= self._limit
            if turn >= _LEAST and self._enough(samples, over):
                break
        return samples

    def _enough(self, samples: Mapping[str, Sequence[float]], over: bool) -> bool:
        """Whether the time is over on one rank, or all times are settled on all."""
        unsettled = not all(settled(each) for each in samples.values())
        votes = np.array([over, unsettled], np.int32)
        self._group.comm.Allreduce(MPI.IN_PLACE, votes, MPI.MAX)
        return bool(votes[0]) or not votes[1]


def rows(
    benchmark: str, nbytes: int, ranks: int, kinds: Sequence[Kind], times: Any
) -> list[Row]:
    """Return what was measured at one size.

    Args:
        benchmark: Its name.
        nbytes: The size.
        ranks: That copied at once.
        kinds: Of the case.
        times: Name to `Times`.
    """
    medians = {name: each.median for name, each in times.items()}
    # A copy reads each byte and writes it.
    rate = 2 * nbytes * ranks / medians["copy"] if "copy" in medians else math.inf
    made = []
    for kind in kinds:
        each: Times = times[kind.name]
        floor = kind.moves / rate
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
            p99_us=1e6 * each.p99,
            max_us=1e6 * each.max,
            algbw=bandwidth if kind.bus else None,
            busbw=bandwidth * kind.bus or None,
            floor_us=1e6 * floor or None,
            vs_mpi=medians[kind.raw] / each.median if kind.raw else None,
            vs_floor=each.median / floor if floor else None,
            figures=kind.figures(medians),
        )
        made.append(row)
    return made

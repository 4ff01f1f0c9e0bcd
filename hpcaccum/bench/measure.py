"""Variants of one operation: each is verified, then all are timed in turns.

As they take turns, the ratios between them hold on a busy machine, too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from hpcaccum import Group, device
from hpcaccum.bench.report import USUAL, Columns
from hpcaccum.bench.rows import Row
from hpcaccum.dtypes import Array
from hpcaccum.machine import free_memory
from hpcaccum.mpi import MPI

Run = Callable[[int], list[float]]

T = TypeVar("T", bound=Any)

# Seconds of one sample at least, far above the cost of reading the clock.
_SAMPLE = 200e-6
_MAX_INNER = 1000
# Turns that are taken even if the time is up.
_LEAST = 3
# The names of the kinds that define the floors of memory and of the network.
COPY, EXCHANGE = "copy", "exchange"
# A local step that is never stale, and a bound of the staleness that none reaches.
NEVER_STALE = ANY_STALENESS = 1 << 30
# Samples from which the 99th percentile is not simply the maximum.
_P99_SAMPLES = 100
# The part of free memory that a benchmark may use.
_USABLE = 0.9


# The gradients of benchmarks, and the check of what is made of them


class WrongAnswerError(RuntimeError):
    """Raised if an operation gives a wrong result."""


def gradient(rank: int, count: int) -> Array:
    """Return the gradient of a rank: ``count`` elements of float32."""
    elements: Array = np.arange(count, dtype=np.float32) % 64
    elements += rank
    return elements


def sum_of_gradients(ranks: int, count: int) -> Array:
    """Return the sum of the gradients of the first ``ranks`` ranks."""
    total = gradient(0, count)
    total *= ranks
    total += ranks * (ranks - 1) / 2
    return total


def check_equal(actual: Array, expected: Any, error: float = 0.0) -> None:
    """Raise WrongAnswerError if elements differ; show the first of them.

    An error is permitted relative to the largest element.
    """
    are_wrong = actual != expected
    if error:
        most = error * np.abs(expected).max(initial=0)
        # Not `> most`, which is false for NaN.
        are_wrong = ~(np.abs(actual - expected) <= most)
    wrong = np.flatnonzero(are_wrong)
    if wrong.size:
        first = wrong[0]
        wanted = np.broadcast_to(expected, actual.shape).flat[first]
        raise WrongAnswerError(
            f"{wrong.size} of {actual.size} elements are wrong: number {first} is "
            f"{actual.flat[first]}, should be {wanted}"
        )


class RingExchange:
    """Every node sends a vector to the next one, and receives one. Collective.

    So every link is in use in both directions at once. The ranks of a node send one
    stripe each: one rank may be slower than the link. Ranks that the smallest node does
    not have send nothing.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        nodes, number = group.nodes, group.node_number
        self._comm = group.comm.Dup()
        width, place = min(map(len, nodes)), nodes[number].index(group.rank)
        before, after = (number - 1) % len(nodes), (number + 1) % len(nodes)
        pattern = np.zeros(0, np.float32)
        self._peers: tuple[int, int] | None = None
        if place < width:
            self._peers = nodes[before][place], nodes[after][place]
            stripes = np.array_split(gradient(0, nbytes // 4), width)
            pattern = stripes[place]
        self.mine, self._expected = pattern + number, pattern + before
        self.got = np.zeros_like(pattern)

    def __call__(self) -> None:
        """Exchange once."""
        if self._peers:
            before, after = self._peers
            self._comm.Sendrecv(self.mine, after, recvbuf=self.got, source=before)

    def check(self) -> None:
        """Raise WrongAnswerError if something else was received."""
        check_equal(self.got, self._expected)

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


# What is measured


@dataclass(frozen=True)
class Kind:
    """One variant of an operation.

    `run` performs it a number of times, on all ranks, and returns samples in seconds
    per operation: none on a rank that only assists. `check` raises WrongAnswerError if
    the last result was wrong. `raw` names the kind that does the same with one call of
    MPI. A `reference` is not hpcaccum, but compared with it. `floor` is the kind whose
    time defines it, and a factor. `bus` is the bus bandwidth over the algorithm
    bandwidth, 0 if they have no meaning. `figures` returns more numbers, from the
    medians of all kinds.
    """

    name: str
    run: Run
    check: Callable[[], None] = lambda: None
    raw: str | None = None
    reference: bool = False
    floor: tuple[str, float] | None = None
    bus: float = 1.0
    figures: Callable[[Mapping[str, float]], dict[str, float]] = lambda _: {}


class Memory(NamedTuple):
    """What each rank of a benchmark needs, in multiples of its size.

    Rank 0 needs more shared memory: `shared_first`, and `shared_all` for each rank. All
    ranks of a node share a device.
    """

    shared: float = 0
    shared_first: float = 0
    shared_all: float = 0
    private: float = 0
    device: float = 0

    def missing(self, group: Group, nbytes: int) -> str | None:
        """Return what a node lacks for this size, or None. Collective."""
        shared = self.shared
        if group.rank == 0:
            shared += self.shared_first + self.shared_all * group.size
        needs = group.node.allgather((shared, self.private, self.device))
        shared, private, on_device = nbytes * np.sum(needs, axis=0)
        host = MPI.Get_processor_name()
        wanted = {}
        if on_device:
            cupy = device.cupy()
            cupy.get_default_memory_pool().free_all_blocks()
            wanted["the device"] = on_device, cupy.cuda.Device().mem_info[0]
        wanted[f"/dev/shm on {host}"] = shared, shutil.disk_usage("/dev/shm").free
        # Shared memory is memory, too.
        wanted[f"memory on {host}"] = shared + private, free_memory()
        problems = [
            f"needs {need / 2**30:.1f} GiB of {where}, {free / 2**30:.1f} GiB are free"
            for where, (need, free) in wanted.items()
            if need > _USABLE * free
        ]
        everybody = group.allgather(problems, "memory")
        return next(itertools.chain.from_iterable(everybody), None)


class Case:
    """The kinds of one benchmark at one size; the base of all benchmarks. Collective.

    The docstring of a subclass describes its rows to users, `help` is one line for
    them, `sizes` are the default, and `columns` those of its table.
    """

    help: ClassVar[str]
    sizes: ClassVar[str] = "4K:256M"
    memory: ClassVar[Memory]
    columns: ClassVar[Columns] = USUAL

    def __init__(
        self, group: Group, nbytes: int, gloo: bool = False, links: Any = None
    ) -> None:
        self.group, self.comm = group, group.comm
        self.rank, self.n = group.rank, group.size
        self.nodes, self.nbytes, self.count = len(group.nodes), nbytes, nbytes // 4
        self.gloo, self.links = gloo, links
        self.kinds: list[Kind] = []
        self._held = contextlib.ExitStack()
        self._results: list[tuple[Any, float]] = []
        self._prepare()

    def _prepare(self) -> None:
        """Make what is measured, and its kinds."""
        raise NotImplementedError

    def _hold(self, thing: T) -> T:
        """Return what `free` must free."""
        self._held.callback(thing.free)
        return thing

    def _result(self, array: Any = None, value: float = np.nan) -> Any:
        """Return an array, one of the size if none is given, that `forget` fills."""
        array = np.zeros(self.count, np.float32) if array is None else array
        self._results.append((array, value))
        return array

    def _add(self, *what: Any, **more: Any) -> None:
        self.kinds.append(Kind(*what, **more))

    def _floor(self, moves: float, crosses: float) -> dict[str, Any]:
        """Return the floor of memory on one node, or that of the links between nodes.

        ``moves`` is what all ranks together must read and write; ``crosses`` what must
        cross the busiest link in one direction; both in units of the size.
        """
        if self.nodes == 1:
            # A copy reads and writes each byte.
            return {"floor": (COPY, moves / (2 * self.n))}
        return {"floor": (EXCHANGE, crosses)}

    def _ring(self) -> RingExchange:
        ring = self._hold(RingExchange(self.group, self.nbytes))
        self._result(ring.got)
        return ring

    def _add_plain(self, target: Array, source: Array) -> None:
        """Add what defines the floors."""
        if self.nodes > 1:
            ring = self._ring()
            run = of_one(self.group, repeated(ring), last=True)
            self._add(EXCHANGE, run, ring.check, reference=True, floor=(EXCHANGE, 1))
        self._add(
            COPY,
            repeated(lambda: np.copyto(target, source)),
            lambda: check_equal(target, source),
            reference=True,
            floor=(COPY, 1),
        )

    def forget(self) -> None:
        """Overwrite all results, so that only a new one is right. Collective."""
        for array, value in self._results:
            array.fill(value)

    def free(self) -> None:
        """Free everything. Collective."""
        self._held.close()
        # They refer to this object, which then only the garbage collector would free.
        self.kinds, self._results = [], []


def sum_everywhere(nodes: int) -> float:
    """Return the floor of a sum that all ranks need, in units of the gradient.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009.
    """
    return 2 * (nodes - 1) / nodes


def update_each(nodes: int, ranks: int) -> float:
    """Return the floor if each gradient is an update; see docs/benchmarks.md."""
    return (ranks / nodes + 1) * (nodes - 1) / nodes


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
    after: Callable[[], object] = lambda: None,
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


def of_one(group: Group, run: Run, *, last: bool = False) -> Run:
    """Return a `Kind.run` whose time is that of rank 0, or that of the last rank."""

    def one(inner: int) -> list[float]:
        seconds = run(inner)
        if last:
            seconds = [max(group.comm.allgather(seconds[0]))]
        return seconds if group.rank == 0 else []

    return one


def measure(case: Case, what: str, seconds: float) -> dict[str, list[float]]:
    """Verify all kinds, then time them in turns; return seconds. Collective."""
    group, kinds = case.group, case.kinds
    inner = {kind.name: _verify(case, kind, what) for kind in kinds}
    samples: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    begun = time.perf_counter()
    for turn in itertools.count(1):
        # In another order each time, as a kind may slow down the next one.
        first = turn % len(kinds)
        for kind in [*kinds[first:], *kinds[:first]]:
            # Do not measure what the previous kind left in the cache.
            kind.run(1)
            group.comm.Barrier()
            samples[kind.name] += kind.run(inner[kind.name])
        over = turn >= _LEAST and time.perf_counter() - begun >= seconds
        if group.comm.bcast(over):
            break
    everybody = group.allgather(samples, what)
    return {
        name: [each for theirs in everybody for each in theirs[name]]
        for name in samples
    }


def _verify(case: Case, kind: Kind, what: str) -> int:
    """Verify one kind; return how many operations a sample has."""
    group = case.group
    case.forget()
    kind.run(1)
    # The result of one rank may depend on the run of another.
    group.comm.Barrier()
    failure = None
    try:
        kind.check()
    except WrongAnswerError as error:
        failure = WrongAnswerError(f"{what}, {kind.name}: {error}")
    group.raise_together(f"{what}, {kind.name}", failure)
    # The first run had cold caches; this one estimates the time.
    group.comm.Barrier()
    mine = max(kind.run(1), default=0.0)
    longest: float = max(group.comm.allgather(mine))
    return min(math.ceil(_SAMPLE / max(longest, 1e-9)), _MAX_INNER)


def rows(benchmark: str, case: Case, samples: Mapping[str, list[float]]) -> list[Row]:
    """Return the rows of one size, from the seconds of each kind."""
    nbytes = case.nbytes
    medians = {name: float(np.median(each)) for name, each in samples.items()}
    made = []
    for kind in case.kinds:
        microseconds = 1e6 * np.array(samples[kind.name])
        percentiles = np.percentile(microseconds, [0, 25, 50, 75, 99, 100])
        low, lower, middle, upper, p99, high = map(float, percentiles)
        median = medians[kind.name]
        which, factor = kind.floor or (kind.name, 0)
        floor = factor * medians[which]
        bandwidth = nbytes / max(median, 1e-9) / 1e9
        row = Row(
            benchmark=benchmark,
            name=kind.name,
            bytes=nbytes,
            raw=kind.raw,
            reference=kind.reference,
            samples=len(microseconds),
            min_us=low,
            median_us=middle,
            p99_us=p99 if len(microseconds) >= _P99_SAMPLES else None,
            max_us=high,
            algbw=bandwidth if kind.bus else None,
            busbw=bandwidth * kind.bus or None,
            floor_us=1e6 * floor or None,
            vs_mpi=medians[kind.raw] / median if kind.raw else None,
            vs_floor=median / floor if floor else None,
            figures=kind.figures(medians),
            spread_us=upper - lower,
        )
        made.append(row)
    return made

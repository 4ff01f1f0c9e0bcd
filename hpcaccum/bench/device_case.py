"""Common parts of benchmarks of a device: buffers, timing by events, memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hpcaccum import device
from hpcaccum.bench.measure import COPY, Kind, Memory, check_equal, first_of, shortage
from hpcaccum.device import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum import Group
    from hpcaccum.bench.measure import Conditions, Run

# The buffers used in rotation together are so many times as large as the cache.
_CACHES, _MOST_TURNS = 3, 32

Buffers = dict[str, Any]


class DeviceMemory(NamedTuple):
    """Device memory that a benchmark needs, in multiples of its size.

    Attributes:
        each: Per rank. All ranks of a node are assumed to share a device.
        host: The CPU memory that it needs.
    """

    each: float
    host: Memory = Memory(shared=0)

    def missing(self, group: Group, nbytes: int) -> str | None:
        """Return what is missing on a device for this size, or None. Collective."""
        wanted = self.each * nbytes * group.node.size
        cupy = device.cupy()
        cupy.get_default_memory_pool().free_all_blocks()
        free, _ = cupy.cuda.Device().mem_info
        problem = first_of(group, shortage("the device", wanted, free))
        return problem or self.host.missing(group, nbytes)


def device_facts() -> dict[str, Any]:
    """Return the properties of the device that figures depend on."""
    cupy = device.cupy()
    runtime, current = cupy.cuda.runtime, cupy.cuda.Device()
    name = runtime.getDeviceProperties(current.id)["name"]
    return {
        "device": name.decode() if isinstance(name, bytes) else str(name),
        "devices": runtime.getDeviceCount(),
        "device_memory": current.mem_info[1],
        "driver": _version(runtime.driverGetVersion()),
        "cupy": cupy.__version__,
    }


def describe_device(facts: dict[str, Any]) -> str:
    """Return these facts and their date in one line."""
    return (
        f"{facts['device']}, {facts['device_memory'] / 2**30:.0f} GiB; CUDA driver "
        f"{facts['driver']}; CuPy {facts['cupy']}; {facts['date']}"
    )


def _version(number: int) -> str:
    """Return a version of CUDA as text: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def timed(operation: Callable[[], object]) -> Run:
    """Return a `Kind.run` that measures time on the device, between two events."""

    def run(inner: int) -> list[float]:
        cuda = device.cupy().cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        for _ in range(inner):
            operation()
        end.record()
        end.synchronize()
        seconds = cuda.get_elapsed_time(begin, end) / 1e3
        return [max(seconds / inner, 1e-9)]

    return run


def turns_of(nbytes: int) -> int:
    """Return how many buffers to use in rotation so that none stays in the cache."""
    attributes = device.cupy().cuda.Device().attributes
    cache = _CACHES * int(attributes.get("L2CacheSize", 0))
    return min(max(-(-cache // nbytes), 1), _MOST_TURNS)


def check_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise WrongAnswerError unless device arrays are equal, within a tolerance."""
    off = abs(actual - expected)
    # Not `off > ...`, which is false for NaN.
    good = off <= tolerance * abs(expected)
    if not bool(good.all()):
        host = actual.get()
        check_equal(host, np.where(good.get(), host, expected.get()))


@dataclass
class Contest:
    """A kernel of the package and the best expression in plain CuPy for the same task.

    Attributes:
        name: Name of the package's.
        ours, cupy: Run on one set of buffers. None if CuPy has no such expression.
        moves: Bytes that must be read and written.
        check: Raises WrongAnswerError if the result in the buffers is wrong.
        check_cupy: The same for CuPy's, if its result is in another buffer.
    """

    name: str
    ours: Callable[[Buffers], object]
    cupy: Callable[[Buffers], object] | None
    moves: float
    check: Callable[[Buffers], None]
    check_cupy: Callable[[Buffers], None] | None = None


class DeviceCase:
    """Contests at one size, and a copy of that size, which is the floor of all.

    Args:
        group: The ranks; each runs the same on its device.
        nbytes: The size.
        conditions: Ignored.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[DeviceMemory] = DeviceMemory(8)

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        self.size, self.nbytes = group.size, nbytes
        self.random = device.cupy().random.default_rng(group.rank)
        self._sets = [self.make(nbytes // 4) for _ in range(turns_of(nbytes))]
        self._turn = itertools.cycle(self._sets)
        self.now = self._sets[0]
        self.contests = self.compete(nbytes)
        self.kinds = [*self._kinds(), self._copy()]

    def make(self, count: int) -> Buffers:
        """Return a set of buffers; "source" and "target" are float32 of the size."""
        raise NotImplementedError

    def compete(self, nbytes: int) -> Sequence[Contest]:
        """Return the contests to measure."""
        raise NotImplementedError

    def spoil(self, buffers: Buffers) -> None:
        """Reset a set of buffers to the state that `check` expects before a run."""
        raise NotImplementedError

    def _kinds(self) -> list[Kind]:
        made = []
        for each in self.contests:
            rival = f"{each.name} CuPy" if each.cupy else None
            made.append(self._kind(each, each.name, each.ours, each.check, raw=rival))
            if rival:
                check = each.check_cupy or each.check
                made.append(self._kind(each, rival, each.cupy, check, reference=True))
        return made

    def _kind(
        self, contest: Contest, name: str, operation: Any, check: Any, **more: Any
    ) -> Kind:
        return Kind(
            name,
            timed(lambda: operation(self._next())),
            lambda: check(self.now),
            moves=contest.moves * self.size,
            # The bus bandwidth is then that of all bytes moved.
            bus=contest.moves / self.nbytes,
            **more,
        )

    def _copy(self) -> Kind:
        def copy() -> None:
            now = self._next()
            device.cupy().copyto(now["target"], now["source"])

        def check() -> None:
            check_same(self.now["target"], self.now["source"])

        moves = 2 * self.nbytes * self.size
        return Kind(COPY, timed(copy), check, reference=True, moves=moves, bus=2)

    def _next(self) -> Buffers:
        self.now = next(self._turn)
        return self.now

    def normal(self, count: int) -> Any:
        """Return random numbers, float32."""
        return self.random.standard_normal(count, dtype=np.float32)

    def forget(self) -> None:
        """Overwrite all results."""
        for each in self._sets:
            each["target"].fill(np.nan)
            self.spoil(each)

    def free(self) -> None:
        """Release the memory."""
        self._sets, self.now = [{}], {}
        self._turn = itertools.cycle(self._sets)
        self.contests, self.kinds = [], []
        device.cupy().get_default_memory_pool().free_all_blocks()


def launch(name: str, count: int, *arguments: Any) -> None:
    """Launch a kernel over ``count`` elements."""
    grid = (kernels.blocks(count),)
    kernels.kernel(name)(grid, (kernels.THREADS,), arguments)

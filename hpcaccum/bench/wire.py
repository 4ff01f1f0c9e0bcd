"""Bytes that each strategy sends between nodes, counted at their interfaces."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcaccum import (
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    SyncReplicasOptimizer,
)
from hpcaccum.bench.measure import (
    ANY_STALENESS,
    EXCHANGE,
    Case,
    Memory,
    RingExchange,
    WrongAnswerError,
    check_equal,
    gradient,
    of_one,
    repeated,
    sum_everywhere,
    sum_of_gradients,
    update_each,
)
from hpcaccum.bench.report import Columns, figure, number_text
from hpcaccum.bench.step import RATE, Optimizing
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum import Group, Optimizer
    from hpcaccum.bench.measure import Run
    from hpcaccum.dtypes import Array

T = TypeVar("T")

_BASE = "cross-shard"
# Names of figures.
OUT, IN, OTHER_OUT, OTHER_IN, LINK, FLOOR, TIME = (
    "bytes out of the host's node",
    "bytes into the host's node",
    "most bytes out of another node",
    "most bytes into another node",
    "bytes on the busiest link",
    "bytes that must cross a link",
    f"times the time of {_BASE}",
)

# An exchange of so many bytes between nodes must show in the counters, and not much
# else: bytes over their number. Headers and acknowledgements of TCP take 5 to 10 %.
_PROBE, _LEAST, _MOST = 1 << 20, 0.95, 1.5
_ATTEMPTS = 5

_CLASS_NET = Path("/sys/class/net")
# ARPHRD_LOOPBACK of the kernel.
_LOOPBACK = "772"


class Wire(Case):
    """Steps over several nodes: every rank contributes one gradient of the size.

    - ``cross-shard``: the cross-shard optimizer, a reduction and an update.
    - ``sync-replicas``: the sync-replicas optimizer with a quorum of all ranks.
    - ``drop-stale``: the drop-stale optimizer, an update for each rank's gradient. AGN
      pushes in the same way, every few steps.
    - ``sync, sharded`` and ``drop, sharded``: both with a server on each node.
    - ``MPI``: the library's Allreduce of the same bytes.
    - ``exchange``: each node sends the bytes to the next one.

    The time is that of the last rank, without its loss. Bytes are those of a step in
    units of the size, counted at the network interfaces of each node: out of and into
    the node of rank 0, which is the host; the most of any other node; the most of all.
    ``need`` is what must cross the busiest link in one direction between N nodes of r
    ranks: 2 (N - 1) / N, and (r + 1) (N - 1) / N for drop-stale, or 2 r (N - 1) / N if
    each rank is sent the parameters of its own update. If one node holds the
    parameters, it is N - 1, and (N - 1) r. ``time`` is over that of cross-shard.
    """

    help = "what each strategy sends between nodes, counted at the links"
    sizes = "4K,1M,16M"
    memory = Memory(shared=16, shared_first=12, shared_all=4, private=22)
    columns = Columns(
        "a step of all ranks; n: samples; bytes at the links, in units of the "
        "gradient:\n"
        "host: out of and into the host's node; another: the most of any other node\n"
        "most: the most of all; need: must cross one; time: over that of cross-shard",
        (
            figure("out", 4, OUT),
            figure("in", 4, IN),
            figure("out", 4, OTHER_OUT),
            figure("in", 4, OTHER_IN),
            figure("most", 4, LINK),
            figure("need", 4, FLOOR),
            figure("time", 4, TIME),
        ),
        above="    host    another",
        times=("min", "median"),
    )

    def _prepare(self) -> None:
        n, group, count = self.n, self.group, self.count
        # Of each kind, the bytes of each node in a step, out and in.
        self._counts: dict[str, list[Array]] = {}
        self._add_steps(_BASE, lambda rule: CrossShardOptimizer(rule, comm=group))
        firsts = [ranks[0] for ranks in group.nodes]
        self._add_one_sided("sync-replicas", "drop-stale", 0)
        self._add_one_sided("sync, sharded", "drop, sharded", firsts)
        mine, total = gradient(self.rank, count), self._result()
        self._add_counted(
            "MPI",
            repeated(lambda: self.comm.Allreduce(mine, total)),
            lambda: check_equal(total, sum_of_gradients(n, count)),
            sum_everywhere(self.nodes),
            reference=True,
        )
        ring = self._ring()
        self._add_counted(EXCHANGE, repeated(ring), ring.check, 1, reference=True)

    def _add_one_sided(self, sync: str, drop: str, servers: int | list[int]) -> None:
        """Add both one-sided optimizers, by the given names."""
        where: Any = {"comm": self.group, "servers": servers}
        self._add_steps(sync, lambda rule: SyncReplicasOptimizer(rule, self.n, **where))
        self._add_steps(
            drop,
            lambda rule: DropStaleGradientOptimizer(rule, ANY_STALENESS, **where),
            each=True,
        )

    def _add_steps(
        self, name: str, make: Callable[[Optimizer], Any], *, each: bool = False
    ) -> None:
        """Add steps of an optimizer that updates with the mean, or each gradient."""
        mine = functools.partial(gradient, self.rank)
        steps = Optimizing(self.count, make, gradient=mine)
        self._hold(steps.optimizer)
        floor, check = sum_everywhere(self.nodes), self._check_mean
        if each:
            floor, check = update_each(self.nodes, self.n), self._check_each
        self._add_counted(name, steps.run, lambda: check(steps), floor)

    def _add_counted(
        self, name: str, run: Run, check: Callable[[], None], floor: float, **more: Any
    ) -> None:
        def counted(inner: int) -> list[float]:
            if not self.links or self.links.obstacle:
                return run(inner)
            seconds, sent = self.links.during(lambda: run(inner))
            self._counts.setdefault(name, []).append(sent / inner)
            return seconds

        def figures(medians: Mapping[str, float]) -> dict[str, float]:
            found = {FLOOR: floor, TIME: medians[name] / medians[_BASE]}
            if name in self._counts:
                # Also of steps that only warm up: they send the same.
                each = np.median(np.stack(self._counts[name]), axis=0) / self.nbytes
                numbers = *each[0], *each[1:].max(axis=0), each.max()
                names = OUT, IN, OTHER_OUT, OTHER_IN, LINK
                found |= dict(zip(names, map(float, numbers), strict=True))
            return found

        more |= {"floor": (EXCHANGE, floor), "figures": figures}
        self._add(name, of_one(self.group, counted, last=True), check, **more)

    def _check_mean(self, steps: Optimizing) -> None:
        for variable in steps.variables:
            mean = gradient(0, variable.value.size) + (self.n - 1) / 2
            check_equal(variable.value, -np.float32(RATE * steps.taken) * mean)

    def _check_each(self, steps: Optimizing) -> None:
        """Compare the center with all updates, this rank's variables with some."""
        n, taken, updates = self.n, steps.taken, int(steps.step.value)
        if not taken <= updates <= n * taken:
            raise WrongAnswerError(f"{updates} updates after {taken} steps")
        center = steps.optimizer.center(steps.variables)
        for variable, total in zip(steps.variables, center, strict=True):
            pattern = gradient(0, variable.value.size)
            ranks = taken * n * (n - 1) / 2
            check_equal(total, np.float32(-RATE) * (n * taken * pattern + ranks))
            # Whose gradients they contain is open, but it is the same everywhere.
            rest = variable.value / np.float32(-RATE) - updates * pattern
            check_equal(rest, rest[0])


class Links:
    """Counts what crosses the links of the nodes during an operation. Collective.

    `obstacle` is why nothing can be counted, or None; `about` tells it to users.
    """

    def __init__(self, group: Group, interfaces: Interfaces | None = None) -> None:
        self._group = group
        self._interfaces = interfaces or Interfaces()
        self._leaders = [ranks[0] for ranks in group.nodes]
        # What the counting itself sends.
        self._idle = np.zeros((len(self._leaders), 2))
        mine = network(), MPI.Get_processor_name(), self._interfaces.names
        everybody = group.allgather(mine, "interfaces of the hosts")
        found = [everybody[rank] for rank in self._leaders]
        self.obstacle = self._unusable(found) or self._probe()
        names = ", ".join(sorted({name for *_, names in found for name in names}))
        self.about = f"bytes counted by {names} of each of {len(found)} nodes"
        if self.obstacle:
            self.about = f"no bytes: {self.obstacle}"

    def _unusable(self, found: Sequence[tuple[str, str, list[str]]]) -> str | None:
        seen: dict[str, int] = {}
        for leader, (name, host, names) in zip(self._leaders, found, strict=True):
            if not names:
                return f"{host} has no interface but loopback that can be read"
            if name in seen:
                both = format_ranks([seen[name], leader])
                return (
                    f"the nodes of {both} are one host, {host};\nwhat they exchange "
                    f"passes none of its interfaces"
                )
            seen[name] = leader
        return None

    def _probe(self) -> str | None:
        """Count a known number of bytes; return what is wrong."""
        exchange = RingExchange(self._group, _PROBE)
        exchange()
        self._idle = self._median(lambda: None)
        ratios = self._median(exchange) / _PROBE
        exchange.free()
        low, high = float(ratios.min()), float(ratios.max())
        if low >= _LEAST and high <= _MOST:
            return None
        return (
            f"a plain exchange changed the counters by {number_text(low)} to "
            f"{number_text(high)} times its bytes;\nMPI uses another network, or the "
            f"interfaces are busy, or update them late"
        )

    def _median(self, operation: Callable[[], None]) -> Array:
        # Other programs may send in between.
        each = [self.during(operation)[1] for _ in range(_ATTEMPTS)]
        median: Array = np.median(np.stack(each), axis=0)
        return median

    def during(self, operation: Callable[[], T]) -> tuple[T, Array]:
        """Return what an operation returns, and the bytes out of and into each node."""
        before = self._read()
        result = operation()
        return result, self._read() - before - self._idle

    def _read(self) -> Array:
        comm = self._group.comm
        # Ranks that are done nap here. In a barrier of MPI they would take the cores
        # from those that are not.
        self._group.allgather(None, "counting bytes")
        mine = np.array(self._interfaces.read(), np.int64)
        counts = np.empty((comm.size, 2), np.int64)
        # No rank begins before all have read.
        comm.Allgather(mine, counts)
        return counts[self._leaders]


class Interfaces:
    """The interfaces of this host that lead to other hosts, listed by the kernel.

    They are all but loopback, and but those that pass their bytes on to others, such as
    a bridge: bytes would be counted twice.
    """

    def __init__(self, root: Path = _CLASS_NET) -> None:
        self._paths = [
            path.parent
            for path in sorted(root.glob("*/statistics"))
            if not any(path.parent.glob("lower_*"))
            and (path.parent / "type").read_text().strip() != _LOOPBACK
        ]
        self.names = [path.name for path in self._paths]

    def read(self) -> tuple[int, int]:
        """Return the bytes since the host started, of all together: sent, received."""
        sent, received = (
            sum(int((path / "statistics" / name).read_text()) for path in self._paths)
            for name in ("tx_bytes", "rx_bytes")
        )
        return sent, received


def network() -> str:
    """Return the same name in processes that share their interfaces, else another.

    Containers of one host may have interfaces of their own.
    """
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started} {Path('/proc/self/ns/net').stat().st_ino}"

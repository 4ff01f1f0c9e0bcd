"""Bytes that each strategy sends between nodes, beside those of the cross-shard one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import (
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    SyncReplicasOptimizer,
)
from hpcaccum.bench.measure import (
    Kind,
    Memory,
    WrongAnswerError,
    check_equal,
    repeated,
    sum_everywhere,
    update_each,
)
from hpcaccum.bench.references import (
    ANY_STALENESS,
    RingExchange,
    gradient,
    sum_of_gradients,
)
from hpcaccum.bench.report import Columns, figure
from hpcaccum.bench.step import RATE, Optimizing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum import Group, Optimizer
    from hpcaccum.bench.measure import Conditions, Run
    from hpcaccum.dtypes import Array

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

COLUMNS = Columns(
    "a step of all ranks; n: samples; bytes at the links, in units of the gradient:\n"
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


class Wire:
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

    Args:
        group: The ranks.
        nbytes: Of a gradient.
        conditions: What counts the bytes.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[Memory] = Memory(
        shared=16, shared_first=12, shared_all=4, private=22
    )

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        links = conditions.links
        self._links = None if links is None or links.obstacle else links
        self._group, self._nbytes = group, nbytes
        # Of each kind, the bytes of each node in a step, out and in.
        self._counts: dict[str, list[Array]] = {}
        self._mine = gradient(group.rank, nbytes // 4)
        self._sum = np.zeros_like(self._mine)
        self._exchange = RingExchange(group, nbytes)
        count = nbytes // 4
        self._strategies = {
            _BASE: _Mean(group, count, lambda r: CrossShardOptimizer(r, comm=group)),
            **self._one_sided("sync-replicas", "drop-stale", count, 0),
            **self._one_sided(
                "sync, sharded",
                "drop, sharded",
                count,
                [ranks[0] for ranks in group.nodes],
            ),
        }
        self.kinds = [*self._ours(), *self._references()]

    def _one_sided(
        self, sync: str, stale: str, count: int, servers: int | list[int]
    ) -> dict[str, _Mean]:
        """Return the steps of both one-sided optimizers, by the given names."""
        group = self._group

        def make_sync(rule: Optimizer) -> SyncReplicasOptimizer:
            return SyncReplicasOptimizer(rule, group.size, comm=group, servers=servers)

        def make_stale(rule: Optimizer) -> DropStaleGradientOptimizer:
            return DropStaleGradientOptimizer(
                rule, ANY_STALENESS, comm=group, servers=servers
            )

        return {
            sync: _Mean(group, count, make_sync),
            stale: _Each(group, count, make_stale),
        }

    def _ours(self) -> list[Kind]:
        n, nodes = self._group.size, len(self._group.nodes)
        least = dict.fromkeys(self._strategies, sum_everywhere(nodes))
        least["drop-stale"] = update_each(nodes, n)
        least["drop, sharded"] = least["drop-stale"]
        return [
            self._kind(name, each.run, each.check, least[name])
            for name, each in self._strategies.items()
        ]

    def _references(self) -> list[Kind]:
        comm, floor = self._group.comm, sum_everywhere(len(self._group.nodes))
        run = repeated(lambda: comm.Allreduce(self._mine, self._sum))
        kinds = [("MPI", run, self._check_mpi, floor)]
        kinds += [(k.name, k.run, k.check, 1.0) for k in self._exchange.kinds]
        return [self._kind(*each, reference=True) for each in kinds]

    def _kind(
        self,
        name: str,
        run: Run,
        check: Callable[[], None],
        floor: float,
        *,
        reference: bool = False,
    ) -> Kind:
        def figures(medians: Mapping[str, float]) -> dict[str, float]:
            found = {FLOOR: floor, TIME: medians[name] / medians[_BASE]}
            return {**self._bytes(name), **found}

        return Kind(
            name,
            lambda inner: self._counted(name, run, inner),
            check,
            crosses=floor * self._nbytes,
            figures=figures,
            reference=reference,
        )

    def _counted(self, name: str, run: Run, inner: int) -> list[float]:
        """Run some steps; return the time of one on the last rank, on rank 0."""
        if self._links is None:
            seconds = run(inner)
        else:
            seconds, sent = self._links.during(lambda: run(inner))
            self._counts.setdefault(name, []).append(sent / inner)
        longest = max(self._group.comm.allgather(seconds[0]))
        return [longest] if self._group.rank == 0 else []

    def _bytes(self, name: str) -> dict[str, float]:
        """Return the medians of the bytes of a step, in units of the size."""
        if self._links is None:
            return {}
        # Also of steps that only warm up: they send the same.
        each = np.median(np.stack(self._counts[name]), axis=0) / self._nbytes
        numbers = [*each[0], *each[1:].max(axis=0), each.max()]
        names = (OUT, IN, OTHER_OUT, OTHER_IN, LINK)
        return dict(zip(names, map(float, numbers), strict=True))

    def _check_mpi(self) -> None:
        check_equal(self._sum, sum_of_gradients(self._group.size, self._sum.size))

    def forget(self) -> None:
        """Overwrite the results, except those of the optimizers."""
        self._sum[:] = np.nan
        self._exchange.forget()

    def free(self) -> None:
        """Free everything. Collective."""
        for each in self._strategies.values():
            each.free()
        self._exchange.free()


class _Mean:
    """Steps of an optimizer that updates with the mean of all gradients."""

    def __init__(
        self, group: Group, count: int, make: Callable[[Optimizer], Any]
    ) -> None:
        self._group, self._steps = group, 0
        self._optimizing = Optimizing(
            count, make, gradient=lambda size: gradient(group.rank, size)
        )
        self._variables = self._optimizing.variables

    def run(self, inner: int) -> list[float]:
        self._steps += inner
        return self._optimizing.run(inner)

    def check(self) -> None:
        """Compare this rank's variables with those expected after its steps."""
        rate = np.float32(RATE * self._steps)
        for variable in self._variables:
            mean = gradient(0, variable.value.size) + (self._group.size - 1) / 2
            check_equal(variable.value, -rate * mean)

    def free(self) -> None:
        self._optimizing.optimizer.free()


class _Each(_Mean):
    """Steps of an optimizer that updates with each gradient."""

    def check(self) -> None:
        """Compare the center with all updates, this rank's variables with some."""
        n, steps = self._group.size, self._steps
        updates = int(self._optimizing.step.value)
        if not steps <= updates <= n * steps:
            raise WrongAnswerError(f"{updates} updates after {steps} steps")
        center = self._optimizing.optimizer.center(self._variables)
        for variable, total in zip(self._variables, center, strict=True):
            pattern = gradient(0, variable.value.size)
            ranks = steps * n * (n - 1) / 2
            check_equal(total, np.float32(-RATE) * (n * steps * pattern + ranks))
            # Whose gradients they contain is open, but it is the same everywhere.
            rest = variable.value / np.float32(-RATE) - updates * pattern
            check_equal(rest, rest[0])

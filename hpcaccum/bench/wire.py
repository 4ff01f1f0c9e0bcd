"""Bytes that each strategy sends between nodes, counted at their interfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpcaccum import (
    SGD,
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    LocalStepsOptimizer,
    Optimizer,
    SyncReplicasOptimizer,
)
from hpcaccum.bench.links import Links
from hpcaccum.bench.measure import (
    ANY_STALENESS,
    EXCHANGE,
    Case,
    Memory,
    Run,
    WrongAnswerError,
    check_equal,
    gradient,
    of_one,
    repeated,
    sum_everywhere,
    sum_of_gradients,
    update_each,
)
from hpcaccum.bench.report import Columns, figure
from hpcaccum.bench.step import RATE, Optimizing
from hpcaccum.dtypes import Array

_BASE = "cross-shard"
# Local steps of a period; each pushes one of the variables.
_PERIOD = 4
_HALF = "bfloat16"
# Relative error of a sum and of parameters that were rounded to it.
_ROUNDED = 2.0**-7
OUT, IN, OTHER_OUT, OTHER_IN, LINK, FLOOR, TIME = (
    "bytes out of the host's node",
    "bytes into the host's node",
    "most bytes out of another node",
    "most bytes into another node",
    "bytes on the busiest link",
    "bytes that must cross a link",
    f"times the time of {_BASE}",
)


class Wire(Case):
    """Steps over several nodes: every rank contributes one gradient of the size.

    - ``cross-shard``: the cross-shard optimizer, a reduction and an update.
    - ``sync-replicas``: the sync-replicas optimizer with a quorum of all ranks.
    - ``drop-stale``: the drop-stale optimizer, an update for each rank's gradient. AGN
      pushes in the same way, every few steps.
    - ``sync, servers`` and ``drop, servers``: both with a server on each node.
    - ``sync, half``: sync-replicas so, with ``wire_dtype="bfloat16"``.
    - ``fragments``: a period of 4 local steps, each of which pushes another quarter of
      the size, with a quorum of all ranks and a server on each node.
    - ``fragm., half``: the same, with ``wire_dtype="bfloat16"``.
    - ``MPI``: the library's Allreduce of the same bytes.
    - ``exchange``: each node sends the bytes to the next one.

    The time is that of the last rank, without its loss. Bytes are those of a step in
    units of the size, counted at the network interfaces of each node: out of and into
    the node of rank 0, which is the host; the most of any other node; the most of all.
    ``need`` is what must cross the busiest link in any program; docs/benchmarks.md has
    the formulas. ``time`` is over that of cross-shard.
    """

    help = "what each strategy sends between nodes, counted at the links"
    sizes = "4K,1M,16M"
    memory = Memory(shared=28, shared_first=21, shared_all=7, private=38)
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
        # The bytes of each node in a step, out and in, by the name of the kind.
        self._counts: dict[str, list[Array]] = {}
        mean, single = sum_everywhere(self.nodes), update_each(self.nodes, n)
        exact, rounded = self._check_mean, partial(self._check_mean, error=_ROUNDED)
        pushed = partial(rounded, period=_PERIOD)
        one: dict[str, Any] = {"comm": group, "servers": 0}
        each = {**one, "servers": [ranks[0] for ranks in group.nodes]}
        half = {**each, "wire_dtype": _HALF}
        cross_shard = partial(CrossShardOptimizer, comm=group)
        sync = partial(SyncReplicasOptimizer, replicas_to_aggregate=n)
        drop = partial(DropStaleGradientOptimizer, staleness=ANY_STALENESS)

        def local(rule: Optimizer, **where: Any) -> Any:
            count: dict[str, Any] = {"quorum": n, "fragments": _PERIOD}
            return LocalStepsOptimizer(rule, SGD(1.0), _PERIOD, **count, **where)

        self._add_steps(_BASE, cross_shard, mean, exact)
        self._add_steps("sync-replicas", partial(sync, **one), mean, exact)
        self._add_steps("drop-stale", partial(drop, **one), single, self._check_each)
        self._add_steps("sync, servers", partial(sync, **each), mean, exact)
        self._add_steps(
            "drop, servers", partial(drop, **each), single, self._check_each
        )
        self._add_steps("sync, half", partial(sync, **half), mean / 2, rounded)
        self._add_steps("fragments", partial(local, **each), mean, pushed, _PERIOD)
        self._add_steps(
            "fragm., half", partial(local, **half), mean / 2, pushed, _PERIOD
        )
        mine, total = gradient(self.rank, count), self._result()
        self._add_counted(
            "MPI",
            repeated(lambda: self.comm.Allreduce(mine, total)),
            lambda: check_equal(total, sum_of_gradients(n, count)),
            mean,
            reference=True,
        )
        ring = self._ring()
        self._add_counted(EXCHANGE, repeated(ring), ring.check, 1, reference=True)

    def _add_steps(
        self,
        name: str,
        make: Callable[[Optimizer], Any],
        floor: float,
        check: Callable[[Optimizing], None],
        period: int = 1,
    ) -> None:
        """Add an optimizer; its time is that of ``period`` steps."""
        steps = Optimizing(self.count, make, gradient=partial(gradient, self.rank))
        self._hold(steps.optimizer)

        def run(inner: int) -> list[float]:
            return [seconds * period for seconds in steps.run(inner * period)]

        self._add_counted(name, run, lambda: check(steps), floor)

    def _add_counted(
        self, name: str, run: Run, check: Callable[[], None], floor: float, **more: Any
    ) -> None:
        def counted(inner: int) -> list[float]:
            if not self.links or self.links.obstacle:
                return run(inner)
            links: Links = self.links
            seconds, sent = links.during(lambda: run(inner))
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

    def _check_mean(
        self, steps: Optimizing, error: float = 0.0, period: int = 1
    ) -> None:
        """Compare variables, which contain this rank's steps since their push."""
        for number, variable in enumerate(steps.variables):
            pattern, own = gradient(0, variable.value.size), -number % period
            total = (steps.taken - own) * (self.n - 1) / 2 + own * self.rank
            expected = np.float32(-RATE) * (steps.taken * pattern + total)
            check_equal(variable.value, expected, error)

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

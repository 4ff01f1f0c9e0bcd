"""A training step, compared with the reducer in it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcaccum import (
    SGD,
    CrossShardOptimizer,
    DropStaleGradientOptimizer,
    Layout,
    Optimizer,
    Reducer,
    SyncReplicasOptimizer,
    Variable,
)
from hpcaccum.bench.measure import (
    ANY_STALENESS,
    Case,
    Memory,
    apart,
    check_equal,
    sum_everywhere,
    update_each,
)
from hpcaccum.dtypes import Array

# A power of two: sums of many steps stay exact.
RATE = 2.0**-10


class Step(Case):
    """Steps of the optimizers on all ranks, without the user's part.

    - ``step``: `minimize`, less the time inside the loss function and the inner
      optimizer; gradients are computed in `gradient_arrays`.
    - ``updating``: the same with the time of the inner optimizer, SGD on all ranks.
    - ``quorum``: a step of the sync-replicas optimizer with a quorum of all ranks,
      whose update is made once. It does what ``updating`` does, and counts gradients.
    - ``drop-stale``: a step of the drop-stale optimizer: each rank pushes its gradient,
      which makes an update, and pulls the parameters. An update reads 2 and writes 1,
      publish and pull read and write: 7 n times the bytes; between N nodes,
      (n / N + 1) (N - 1) / N times over each link.
    - ``reducer``: the same steps written by hand; only the reducer is timed, which is
      what a step should cost. In both, each of n ranks reads one stripe of all n
      gradients and writes it once: n + 1 times the bytes in all.
    - ``MPI``: the library's Allreduce of the same bytes, also freshly written.
    - ``exchange``: between N nodes, each sends the bytes to the next one. A step must
      send 2 (N - 1) / N times the bytes over each link.
    - ``copy``: a plain copy by all ranks at once.
    """

    help = "a training step, compared with the reducer in it"
    memory = Memory(shared=7, shared_first=9, shared_all=1, private=17)

    def _prepare(self) -> None:
        n, group, count = self.n, self.group, self.count

        cross_shard = functools.partial(CrossShardOptimizer, comm=group)
        quorum = functools.partial(
            SyncReplicasOptimizer, replicas_to_aggregate=n, comm=group
        )
        drop_stale = functools.partial(
            DropStaleGradientOptimizer, staleness=ANY_STALENESS, comm=group
        )
        common = self._floor(n + 1, sum_everywhere(self.nodes))
        each = self._floor(7 * n, update_each(self.nodes, n))
        common["bus"] = each["bus"] = 2 * (n - 1) / n
        for name, floor, steps in (
            ("step", common, Optimizing(count, cross_shard, without_rule=True)),
            ("updating", common, Optimizing(count, cross_shard)),
            ("quorum", common, Optimizing(count, quorum)),
            ("drop-stale", each, Optimizing(count, drop_stale)),
        ):
            self._hold(steps.optimizer)
            self._add(name, steps.run, steps.check, raw="MPI", **floor)
        self._add("reducer", *self._reducer_alone(), raw="MPI", **common)
        mine, out = np.ones(count, np.float32), self._result()
        mpi = apart(lambda: mine.fill(1), lambda: self.comm.Allreduce(mine, out))
        check = functools.partial(check_equal, out, np.float32(n))
        self._add("MPI", mpi, check, reference=True, **common)
        self._add_plain(out, mine)

    def _reducer_alone(self) -> tuple[Any, Callable[[], None]]:
        """Return the steps written by hand, and the check of their last result."""
        variables, rule = _variables(self.count), SGD(RATE)
        layout = Layout({v.name: v.shape for v in variables}, np.float32)
        reducer = self._hold(Reducer(layout, self.group, "bench"))
        means: dict[str, Array] = {}

        def write() -> None:
            for array in reducer.arrays().values():
                array[:] = 1

        def update() -> None:
            # Ranks finish it at different times; the next reduction waits for the last.
            rule.apply_gradients([(means[v.name], v) for v in variables])

        def check() -> None:
            for mean in means.values():
                check_equal(mean, np.float32(1))

        return apart(write, lambda: means.update(reducer.reduce()), update), check


class Optimizing:
    """Steps of an optimizer, without the user's part of the time. Collective.

    The variables have ``count`` elements in all, and are 0 at first. `taken` is the
    number of steps. ``make`` returns the optimizer for a rule, whose time is left out,
    too, if ``without_rule``. ``gradient`` returns this rank's gradient of a variable,
    from its number of elements.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[Optimizer], Any],
        *,
        without_rule: bool = False,
        gradient: Callable[[int], Any] = lambda _: 1,
    ) -> None:
        # A rule that measures itself is not divided among ranks.
        self._rule = _TimedSGD(RATE) if without_rule else SGD(RATE)
        self.optimizer = make(self._rule)
        self.variables = _variables(count)
        self._grads = {v.name: gradient(v.value.size) for v in self.variables}
        self.step = Variable(np.zeros((), np.int64), "global_step")
        self.optimizer.initialize(self.variables)
        self.taken, self._loss_seconds = 0, 0.0

    def _loss(self) -> tuple[float, dict[str, Array]]:
        begun = time.perf_counter()
        grads = self.optimizer.gradient_arrays()
        for name, grad in grads.items():
            grad[:] = self._grads[name]
        self._loss_seconds += time.perf_counter() - begun
        return 0.0, grads

    def run(self, inner: int) -> list[float]:
        """Return the seconds of a step outside the loss, and outside the rule."""
        self.taken += inner
        begun = time.perf_counter() - self._left_out()
        for _ in range(inner):
            self.optimizer.minimize(self._loss, self.step)
        return [(time.perf_counter() - self._left_out() - begun) / inner]

    def _left_out(self) -> float:
        return self._loss_seconds + getattr(self._rule, "seconds", 0.0)

    def check(self) -> None:
        """Compare the variables with what they are if all gradients are 1."""
        for variable in self.variables:
            check_equal(variable.value, np.float32(-RATE * int(self.step.value)))


def _variables(count: int) -> list[Variable]:
    """Return four variables, ``count`` elements in all."""
    return [
        Variable(np.zeros(count // 4, np.float32), f"weights{number}")
        for number in range(4)
    ]


class _TimedSGD(SGD):
    """Measures the time of its updates."""

    seconds = 0.0

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        begun = time.perf_counter()
        updated = super().apply_gradients(grads_and_vars, global_step, name)
        self.seconds += time.perf_counter() - begun
        return updated

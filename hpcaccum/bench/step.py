"""A training step, compared with the reducer in it."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import (
    SGD,
    CrossShardOptimizer,
    Layout,
    Reducer,
    SyncReplicasOptimizer,
    Variable,
)
from hpcaccum.bench.measure import Kind, Memory, apart, check_equal, sum_everywhere
from hpcaccum.bench.references import RingExchange, plain_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum import Group, Optimizer
    from hpcaccum.bench.measure import Conditions
    from hpcaccum.dtypes import Array

# A power of two: sums of many steps stay exact.
RATE = 2.0**-10


class Step:
    """Steps of the cross-shard optimizer, without the user's part.

    - ``step``: `minimize`, less the time inside the loss function and the inner
      optimizer; gradients are computed in `gradient_arrays`.
    - ``updating``: the same with the time of the inner optimizer, SGD on all ranks.
    - ``quorum``: a step of the sync-replicas optimizer with a quorum of all ranks,
      whose update is made once. It does what ``updating`` does, and counts gradients.
    - ``reducer``: the same steps written by hand; only the reducer is timed, which is
      what a step should cost. In both, each of n ranks reads one stripe of all n
      gradients and writes it once: n + 1 times the bytes in all.
    - ``MPI``: the library's Allreduce of the same bytes, also freshly written.
    - ``exchange``: between N nodes, each sends the bytes to the next one. A step must
      send 2 (N - 1) / N times the bytes over each link.
    - ``copy``: a plain copy by all ranks at once.

    Args:
        group: The ranks.
        nbytes: Of the parameters, in four arrays.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[Memory] = Memory(shared=6, shared_first=6, private=13)

    def __init__(self, group: Group, nbytes: int, _: Conditions) -> None:
        self._comm = group.comm
        self._mine = np.zeros(nbytes // 4, np.float32)
        self._out = np.zeros_like(self._mine)
        self._optimizing = Optimizing(
            self._mine.size,
            lambda rule: CrossShardOptimizer(rule, comm=group),
            without_rule=True,
        )
        n, count = group.size, self._mine.size
        self._updating = Optimizing(
            count, lambda rule: CrossShardOptimizer(rule, comm=group)
        )
        self._quorum = Optimizing(
            count, lambda rule: SyncReplicasOptimizer(rule, n, comm=group)
        )
        variables = self._optimizing.variables
        layout = Layout({v.name: v.shape for v in variables}, np.float32)
        self._reducer = Reducer(layout, group, "bench")
        self._means: Mapping[str, Array] = {}
        self._rule = SGD(RATE)
        self._others = [Variable(np.zeros_like(v.value), v.name) for v in variables]
        self._exchange = RingExchange(group, nbytes)
        self.kinds = self._kinds(nbytes, group)

    def _kinds(self, nbytes: int, group: Group) -> list[Kind]:
        n, nodes = group.size, len(group.nodes)
        # Between nodes, the network is the limit, not memory.
        floor = {"crosses": sum_everywhere(nodes) * nbytes}
        if group.single_node:
            floor = {"moves": (n + 1) * nbytes}
        common: Any = {"raw": "MPI", "bus": 2 * (n - 1) / n, **floor}
        reduce = apart(self._write, self._reduce, self._update)
        allreduce = apart(self._write_mine, self._allreduce, lambda: None)

        def ratio(medians: Mapping[str, float]) -> dict[str, float]:
            return {"times the reducer's time": medians["step"] / medians["reducer"]}

        def price(medians: Mapping[str, float]) -> dict[str, float]:
            return {
                "times the time of updating": medians["quorum"] / medians["updating"]
            }

        def steps(name: str, optimizing: Optimizing, **more: Any) -> Kind:
            check = functools.partial(_check_steps, optimizing)
            return Kind(name, optimizing.run, check, **common, **more)

        return [
            steps("step", self._optimizing, figures=ratio),
            steps("updating", self._updating),
            steps("quorum", self._quorum, figures=price),
            Kind("reducer", reduce, self._check_reduced, **common),
            Kind(
                "MPI",
                allreduce,
                self._check_allreduce,
                reference=True,
                **{**common, "raw": None},
            ),
            *self._exchange.kinds,
            plain_copy(self._out, self._mine, n),
        ]

    def _write(self) -> None:
        for array in self._reducer.arrays().values():
            array[:] = 1

    def _reduce(self) -> None:
        self._means = self._reducer.reduce()

    def _update(self) -> None:
        # Ranks finish it at different times; the next reduction waits for the last.
        self._rule.apply_gradients([(self._means[v.name], v) for v in self._others])

    def _write_mine(self) -> None:
        self._mine[:] = 1

    def _allreduce(self) -> None:
        self._comm.Allreduce(self._mine, self._out)

    def _check_reduced(self) -> None:
        for mean in self._means.values():
            check_equal(mean, np.float32(1))

    def _check_allreduce(self) -> None:
        check_equal(self._out, np.float32(self._comm.size))

    def forget(self) -> None:
        """Overwrite the results, except those of the optimizer."""
        self._out[:] = np.nan
        self._means = {"": self._out}
        self._exchange.forget()

    def free(self) -> None:
        """Free the windows. Collective."""
        self._means = {}
        for each in (self._optimizing, self._updating, self._quorum):
            each.optimizer.free()
        self._reducer.free()
        self._exchange.free()


class Optimizing:
    """Steps of an optimizer, without the user's part of the time. Collective.

    The variables are 0 at first.

    Args:
        count: Elements of all variables.
        make: Returns the optimizer for a rule.
        without_rule: Whether to leave out the time of the rule, too.
        gradient: Returns this rank's gradient of a variable, from its elements.
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
        self._timed = _TimedSGD(RATE) if without_rule else None
        self.optimizer = make(self._timed or SGD(RATE))
        self.variables = [
            Variable(np.zeros(size, np.float32), name)
            for name, size in _network(count).items()
        ]
        self._grads = {v.name: gradient(v.value.size) for v in self.variables}
        self.step = Variable(np.zeros((), np.int64), "global_step")
        self.optimizer.initialize(self.variables)
        self._loss_seconds = 0.0

    def _loss(self) -> tuple[float, dict[str, Array]]:
        begun = time.perf_counter()
        grads = self.optimizer.gradient_arrays()
        for name, grad in grads.items():
            grad[:] = self._grads[name]
        self._loss_seconds += time.perf_counter() - begun
        return 0.0, grads

    def run(self, inner: int) -> list[float]:
        """Return the seconds of a step outside the loss, and outside the rule."""
        self._loss_seconds = 0.0
        if self._timed is not None:
            self._timed.seconds = 0.0
        begun = time.perf_counter()
        for _ in range(inner):
            self.optimizer.minimize(self._loss, self.step)
        seconds = time.perf_counter() - begun - self._loss_seconds
        if self._timed is not None:
            seconds -= self._timed.seconds
        return [seconds / inner]


def _check_steps(optimizing: Optimizing) -> None:
    steps = int(optimizing.step.value)
    for variable in optimizing.variables:
        check_equal(variable.value, np.float32(-RATE * steps))


def _network(count: int) -> dict[str, int]:
    """Return elements of the variables of two layers, ``count`` in all."""
    biases = min(1024, count // 16)
    first = count // 2 - biases
    rest = count - first - 2 * biases
    sizes = (first, biases, rest, biases)
    return dict(zip(("weights0", "biases0", "weights1", "biases1"), sizes, strict=True))


class _TimedSGD(SGD):
    """Measures the time of its updates."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.seconds = 0.0

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Change the variables by their gradients."""
        begun = time.perf_counter()
        try:
            return super().apply_gradients(grads_and_vars, global_step, name)
        finally:
            self.seconds += time.perf_counter() - begun

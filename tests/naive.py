"""What hpcaccum computes, as anyone would write it: NumPy and threads in one process.

Read this before the package. There, ranks are processes on several nodes, and a
gradient must not be lost or counted twice although no rank holds a lock while it sends
one. Here, workers are threads, and one lock for each object is enough. The results are
the same, bit for bit, if gradients come in the same order; tests compare them.

- `Accumulator`: gradients that are not stale are added; a take waits for enough.
- `allreduce`: the mean over all ranks.
- `cross_shard`, `SyncReplicas`, `DropStale`, `AGNWorker` and `LocalStepsWorker`: the
  strategies. A model is a dictionary of arrays; a rule, such as `Momentum`, updates it
  in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
Rule = Callable[[Arrays, Mapping[str, Any]], None]


class Accumulator:
    """Adds gradients until somebody takes them; TensorFlow's ConditionalAccumulator.

    Attributes:
        step: Number of takes so far, unless it was set.
        count: Gradients added since the last take.
        weight: Sum of their weights.
    """

    def __init__(self, reduction_type: str = "MEAN") -> None:
        self.step, self.count, self.weight = 0, 0, 0.0
        self._sum: Any = None
        self._mean = reduction_type == "MEAN"
        self._changed = threading.Condition()
        # Takes are served first come, first served.
        self._tickets = self._served = 0

    def apply_grad(
        self, gradient: Any, local_step: int = 0, weight: float = 1.0
    ) -> bool:
        """Add a gradient unless it is stale; return whether it was added."""
        with self._changed:
            if local_step < self.step:
                return False
            gradient = weighted(np.array(gradient), weight)
            self._sum = gradient if self._sum is None else self._sum + gradient
            self.count += 1
            self.weight += weight
            self._changed.notify_all()
            return True

    def take_grad(self, num_required: int) -> Any:
        """Wait for so many gradients; return the mean (or sum) of all there are.

        That is sum(weight * gradient) / sum(weight), or sum(weight * gradient).
        """
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1
            self._changed.wait_for(
                lambda: self._served == ticket and self.count >= num_required
            )
            total, weight = self._sum, self.weight
            self._sum, self.count, self.weight = None, 0, 0.0
            self.step, self._served = self.step + 1, self._served + 1
            self._changed.notify_all()
            return total / total.dtype.type(weight) if self._mean else total

    def set_global_step(self, step: int) -> None:
        """Set the step; what was added stays."""
        with self._changed:
            self.step = step


def weighted(gradient: Any, weight: float) -> Any:
    """Return a gradient times its weight."""
    return gradient * gradient.dtype.type(weight)


def allreduce(
    parts: Sequence[Any],
    reduction_type: str = "MEAN",
    weights: Sequence[float] | None = None,
) -> Any:
    """Return the mean or the sum of the arrays of all ranks, added in rank order."""
    accumulator = Accumulator(reduction_type)
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        accumulator.apply_grad(part, weight=weight)
    return accumulator.take_grad(len(parts))


def mean(
    gradients: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None
) -> Arrays:
    """Return the mean of gradients of a whole model."""
    return {
        name: allreduce([each[name] for each in gradients], weights=weights)
        for name in gradients[0]
    }


def rounded(arrays: Mapping[str, Any], wire: Any) -> Arrays:
    """Return arrays after they have travelled in another dtype; None: in theirs."""
    if wire is None:
        return {**arrays}
    return {name: each.astype(wire).astype(each.dtype) for name, each in arrays.items()}


def mean_between(
    gradients: Sequence[Mapping[str, Any]], nodes: Sequence[Sequence[int]], wire: Any
) -> Arrays:
    """Return the mean of gradients of ranks on nodes; the first has the server.

    Each node adds those of its ranks. The sums of the others are rounded on their way.
    """
    sums = [
        {n: allreduce([gradients[r][n] for r in ranks], "SUM") for n in gradients[0]}
        for ranks in nodes
    ]
    sums[1:] = [rounded(each, wire) for each in sums[1:]]
    total = {n: allreduce([each[n] for each in sums], "SUM") for n in gradients[0]}
    return {n: each / each.dtype.type(len(gradients)) for n, each in total.items()}


class Momentum:
    """slot = momentum * slot + gradient; value -= rate * slot. SGD has no momentum."""

    def __init__(self, rate: float, momentum: float = 0.0) -> None:
        self.rate, self.momentum = rate, momentum
        self.slots: Arrays = {}

    def __call__(self, values: Arrays, gradient: Mapping[str, Any]) -> None:
        """Update the values in place."""
        for name, value in values.items():
            number = value.dtype.type
            slot = self.slots.get(name, np.zeros_like(value))
            self.slots[name] = number(self.momentum) * slot + gradient[name]
            value -= number(self.rate) * self.slots[name]


def cross_shard(
    replicas: Sequence[Arrays],
    rules: Sequence[Rule],
    gradients: Sequence[Mapping[str, Any]],
    weights: Sequence[float] | None = None,
) -> None:
    """Make one update of each rank of a group, with the mean of their gradients."""
    average = mean(gradients, weights)
    for values, rule in zip(replicas, rules, strict=True):
        rule(values, average)


class Server:
    """Has the parameters that workers share, the center, and updates them.

    Attributes:
        step: Number of updates.
    """

    def __init__(self, values: Mapping[str, Any], rule: Rule) -> None:
        self.values = {name: np.array(value) for name, value in values.items()}
        self.step = 0
        self._rule, self._changed = rule, threading.Condition()

    def pull(self, newer_than: int = -1) -> tuple[Arrays, int]:
        """Wait for a newer step; return it, after a copy of its parameters."""
        with self._changed:
            self._changed.wait_for(lambda: self.step > newer_than)
            return {n: value.copy() for n, value in self.values.items()}, self.step

    def update(self, gradient: Mapping[str, Any]) -> None:
        """Make an update."""
        with self._changed:
            self._rule(self.values, gradient)
            self.step += 1
            self._changed.notify_all()


class SyncReplicas(Server):
    """Updates with the mean of the first ``quorum`` gradients of a step.

    Gradients of an earlier step are dropped. If ``late`` is not 0, those of the step
    before are not, but their weight is multiplied by it. Chen et al., "Revisiting
    Distributed Synchronous SGD", 2016, https://arxiv.org/abs/1604.00981.

    Attributes:
        round: Gradients since the last update.
    """

    def __init__(
        self, values: Mapping[str, Any], rule: Rule, quorum: int, late: float = 0.0
    ) -> None:
        super().__init__(values, rule)
        self._quorum, self._late = quorum, late
        self.round: list[Mapping[str, Any]] = []
        self._weights: list[float] = []

    def push(
        self, gradient: Mapping[str, Any], local_step: int, weight: float = 1.0
    ) -> bool:
        """Give a gradient; if it is accepted, the worker pulls the next step."""
        with self._changed:
            lag = self.step - local_step
            if lag > (1 if self._late else 0):
                return False
            self.round.append(gradient)
            self._weights.append(weight * (self._late if lag == 1 else 1))
            if len(self.round) == self._quorum:
                self.update(mean(self.round, self._weights))
                self.round, self._weights = [], []
            return True


class DropStale(Server):
    """Updates with each gradient that is at most ``staleness`` updates late.

    It is multiplied by ``lateness(lag)`` before. Zhang et al., "Staleness-aware
    Async-SGD", 2016, https://arxiv.org/abs/1511.05950.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        rule: Rule,
        staleness: float,
        lateness: Callable[[int], float] = lambda lag: 1.0,
    ) -> None:
        super().__init__(values, rule)
        self._staleness, self._lateness = staleness, lateness

    def push(
        self, gradient: Mapping[str, Any], local_step: int, weight: float = 1.0
    ) -> bool:
        """Make one update with weight * gradient, unless it is too late."""
        with self._changed:
            if (lag := self.step - local_step) > self._staleness:
                return False
            weight *= self._lateness(lag)
            self.update({n: weighted(each, weight) for n, each in gradient.items()})
            return True


class FragmentsWorker:
    """Makes local steps; pushes fragments of its variables one after the other.

    Douillard et al., "Streaming DiLoCo", 2025, https://arxiv.org/abs/2501.18512.

    Args:
        servers: Of each fragment, with the outer rules.
        rule: Of the local steps, with slots of its own.
    """

    def __init__(self, servers: Sequence[Any], rule: Rule) -> None:
        self._servers, self._rule = servers, rule
        pulled = [server.pull() for server in servers]
        self._centers = [center for center, _ in pulled]
        self._steps = [step for _, step in pulled]
        self._pushed: list[Arrays] = [{} for _ in servers]
        self.values = {n: x.copy() for each in self._centers for n, x in each.items()}

    def step(self, gradient: Mapping[str, Any]) -> None:
        """Make a local step."""
        self._rule(self.values, gradient)

    def difference(self, number: int) -> Arrays:
        """Return what is pushed of a fragment."""
        center = self._centers[number]
        self._pushed[number] = {name: self.values[name].copy() for name in center}
        return {name: center[name] - x for name, x in self._pushed[number].items()}

    def take(self, number: int, wire: Any = None) -> None:
        """Take the new center of a fragment; keep what has changed since the push."""
        found, self._steps[number] = self._servers[number].pull(self._steps[number])
        center = rounded(found, wire)
        for name, x in self._pushed[number].items():
            self.values[name][...] = center[name] + (self.values[name] - x)
        self._centers[number] = center

    def due(self, call: int, period: int, overlap: int = 0) -> list[int]:
        """Return which fragments are pushed, or taken, in a call, from 1."""
        count = len(self._servers)
        begin = [f * period // count for f in range(count)]
        at = call - overlap
        return [f for f in range(count) if at > 0 and at % period == begin[f]]


class LocalStepsWorker(FragmentsWorker):
    """Has one fragment; each ``period``-th step also pushes it, and waits.

    Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105.
    """

    def __init__(self, server: Any, rule: Rule, period: int) -> None:
        super().__init__([server], rule)
        self._period = period
        self._gradients: list[Mapping[str, Any]] = []

    def step(self, gradient: Mapping[str, Any], weight: float = 1.0) -> bool:
        """Make a local step with weight * gradient; return whether it pushed."""
        gradient = {n: weighted(each, weight) for n, each in gradient.items()}
        super().step(gradient)
        self._gradients.append(gradient)
        if len(self._gradients) < self._period:
            return False
        difference = self.difference(0)
        self._servers[0].push(self._of_period(difference), self._steps[0])
        self._gradients = []
        self.take(0)
        return True

    def _of_period(self, difference: Arrays) -> Arrays:
        return difference


class AGNWorker(LocalStepsWorker):
    """Pushes the mean gradient instead, to a `DropStale` without a limit.

    Hermans and Spanakis, "Accumulated Gradient Normalization", 2017,
    https://arxiv.org/abs/1710.02368, in the form of TensorFlow's AGNOptimizer.
    """

    def _of_period(self, difference: Arrays) -> Arrays:
        return mean(self._gradients)

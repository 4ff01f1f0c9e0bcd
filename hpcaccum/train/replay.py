"""Repeats the updates of a recorded run in one process, with the same bits.

Model, data, rules and sums are those of the run. A gradient is computed when the
parameters have the step that it was computed with, and kept until its update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcaccum import Layout, Variable
from hpcaccum.summation import add_in_order
from hpcaccum.train.data import batches
from hpcaccum.train.model import MLP
from hpcaccum.train.recording import digests, finite
from hpcaccum.train.strategies import RULES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.checks import Pairs
    from hpcaccum.train.data import Dataset
    from hpcaccum.train.recording import Gradient, Recording


class DifferenceError(Exception):
    """Raised if the replay is not the recorded run."""


class Replica:
    """A model and the rule that updates it.

    Args:
        recording: The run.

    Attributes:
        model: The model, with the initial weights of the run.
    """

    def __init__(self, recording: Recording) -> None:
        self.model = MLP(recording.widths, recording.seed, Variable)
        self._rule = RULES[recording.optimizer](recording.rate)
        self._rule.initialize(self.model.variables)
        values = {var.name: var.value for var in self.model.variables}
        self._layout = Layout.of(values)

    def gradient(self, x: Array, y: Array) -> tuple[float, Array]:
        """Return the loss of a batch, and its gradients as a vector."""
        vector = np.zeros(self._layout.size, self._layout.dtype)
        loss, _ = self.model.loss_and_gradients(x, y, self._layout.views(vector))
        return loss, vector

    def update(self, vector: Array) -> None:
        """Update the variables with gradients."""
        views = self._layout.views(vector)
        pairs: Pairs = [(views[var.name], var) for var in self.model.variables]
        self._rule.apply_gradients(pairs)

    def set_variables(self, other: Replica) -> None:
        """Copy the variables of another one; the slots stay."""
        for mine, theirs in zip(
            self.model.variables, other.model.variables, strict=True
        ):
            np.copyto(mine.value, theirs.value)

    def digests(self) -> dict[str, str]:
        """Return the digests of variables and slots."""
        return digests(self._rule.snapshot())


class Worker:
    """The gradients of one rank.

    Args:
        recording, data: Of the run.
        rank: The rank.
        center: The parameters, from which it takes its own.
    """

    def __init__(
        self, recording: Recording, data: Dataset, rank: int, center: Replica
    ) -> None:
        self._batches = batches(
            data, recording.batch, rank, recording.ranks, recording.seed
        )
        self._next, self._center = 0, center
        local = recording.strategy == "agn"
        self._period = recording.period if local else 1
        self._local = Replica(recording) if local else None

    def gradient(self, number: int) -> tuple[float, Array]:
        """Return the last loss, and the gradient of this number, at the center.

        Those before it that are missing were dropped: they used their batches.
        """
        for _ in range((number - self._next) * self._period):
            next(self._batches)
        self._next = number + 1
        if self._local is None:
            return self._center.gradient(*next(self._batches))
        self._local.set_variables(self._center)
        return self._local_mean(self._local)

    def _local_mean(self, local: Replica) -> tuple[float, Array]:
        """Make the local updates between two pushes; return the mean gradient."""
        loss, vectors = 0.0, []
        for _ in range(self._period):
            loss, vector = local.gradient(*next(self._batches))
            local.update(vector)
            vectors.append(vector)
        return loss, _sum(vectors, self._period)


class Replay:
    """A run that is repeated.

    Args:
        recording: The run.
        data: That of the run.

    Attributes:
        center: The parameters.
    """

    def __init__(self, recording: Recording, data: Dataset) -> None:
        self._recording = recording
        self.center = Replica(recording)
        self._workers = [
            Worker(recording, data, rank, self.center)
            for rank in range(recording.ranks)
        ]
        # By rank, those that are computed and part of no update yet.
        self._vectors: dict[int, Array] = {}

    def run(self, updates: int) -> None:
        """Make the first updates of the run.

        Raises:
            DifferenceError: If one of them, or a loss, is not that of the record.
        """
        due = self._by_step(updates)
        for step, (_, gradients) in enumerate(self._recording.updates[:updates]):
            for gradient in due.pop(step, ()):
                self._compute(gradient)
            ranks = [gradient.rank for gradient in gradients]
            vectors = {rank: self._vectors.pop(rank) for rank in ranks}
            self.center.update(mean(vectors, self._recording.nodes))

    def _by_step(self, updates: int) -> dict[int, list[Gradient]]:
        """Return the gradients of some updates by the step of their parameters."""
        due: dict[int, list[Gradient]] = {}
        # Of each rank: its last gradient, and the update that this made.
        last: dict[int, tuple[int, int]] = {}
        made = self._recording.updates[:updates]
        for update, (found, gradients) in enumerate(made, 1):
            if found != update:
                raise DifferenceError(
                    f"the record has update {found} in the place of update {update}"
                )
            for gradient in gradients:
                _check_order(update, gradient, last.get(gradient.rank))
                last[gradient.rank] = gradient.number, update
                due.setdefault(gradient.step, []).append(gradient)
        return due

    def _compute(self, gradient: Gradient) -> None:
        loss, vector = self._workers[gradient.rank].gradient(gradient.number)
        if finite(loss) != gradient.loss:
            raise DifferenceError(
                f"at step {gradient.step}, gradient {gradient.number} of rank "
                f"{gradient.rank} has the loss {loss}, in the record {gradient.loss}: "
                f"an update before it is not that of the run"
            )
        self._vectors[gradient.rank] = vector

    def compare(self) -> None:
        """Raise DifferenceError unless variables and slots are those of the end."""
        found = self.center.digests()
        for name, digest in self._recording.digests.items():
            if found.get(name) != digest:
                raise DifferenceError(
                    f"{name} differs after the last update: its digest is "
                    f"{found.get(name)}, in the record {digest}"
                )


def _check_order(update: int, gradient: Gradient, last: tuple[int, int] | None) -> None:
    """Raise DifferenceError if a gradient cannot be part of an update.

    Args:
        update: The number of the update.
        gradient: The gradient.
        last: The number of the gradient of this rank before it, and the update of that.
    """
    rank, number, step, _ = gradient
    what = f"update {update} cannot have gradient {number} of rank {rank}"
    if step >= update:
        raise DifferenceError(f"{what}: it was computed at step {step}")
    # A rank waits for the update of its gradient.
    if last is not None and not (last[0] < number and last[1] <= step):
        raise DifferenceError(
            f"{what}, computed at step {step}: update {last[1]} has its gradient "
            f"{last[0]}"
        )


def mean(vectors: Mapping[int, Array], nodes: Sequence[Sequence[int]]) -> Array:
    """Return the mean of gradients with the bits of an update.

    The sum is formed in rank order on each node, then in the order of the nodes.

    Args:
        vectors: By rank.
        nodes: The ranks of each node.
    """
    parts = [[vectors[rank] for rank in ranks if rank in vectors] for ranks in nodes]
    return _sum([_sum(part) for part in parts if part], len(vectors))


def _sum(parts: Sequence[Array], divisor: int = 1) -> Array:
    total = np.empty_like(parts[0])
    # No warning: an overflow shows up as inf in the result.
    with np.errstate(all="ignore"):
        add_in_order(parts, total, divisor)
    return total

"""Measurements of a run: evaluations of the model, and totals at the end."""

from __future__ import annotations

import bisect
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

# Least time between two evaluations, in multiples of the time of one: evaluation
# then takes at most a twentieth of the run, whatever the data.
_PAUSE = 20

# Lower bounds of the classes of lags that are shown. The optimizers count lags of 31
# and more together.
_LAGS = (0, 1, 2, 3, 4, 8, 16, 31)
LAG_NAMES = ("0", "1", "2", "3", "4-7", "8-15", "16-30", "31+")


@dataclass(frozen=True)
class Record:
    """One evaluation of the model.

    Attributes:
        group: Number of the model's shard group; 0 if there is one model.
        seconds: Time since the start.
        step: Number of updates applied to the parameters.
        epoch: The work that is done, in epochs.
        loss: Mean over this rank's batches since its last record; None if there are
            none.
        test_loss, accuracy: On the test samples.
    """

    strategy: str
    group: int
    seconds: float
    step: int
    epoch: float
    loss: float | None
    test_loss: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """The result of one run; the same on all ranks.

    Attributes:
        seconds: Time from the common start until the last rank stopped.
        updates: Number of updates applied to the parameters of one model; of several,
            the one with the fewest.
        target: The number that the options ask for.
        stopped: The exit status if it was asked to stop before that; else 0.
        resumed_at: How many of them were made by earlier jobs.
        earlier: How many of the accepted gradients were.
        gradient_samples: Number of samples in one gradient.
        accepted, dropped: Number of gradients of each rank, also of earlier jobs.
        lags: Lag to number of gradients.
        waited: Seconds that each rank waited in the optimizer, in this job.
        accuracy: Test accuracy of each group's final model.
        records: Group by group, each in chronological order.
    """

    strategy: str
    seconds: float
    updates: int
    target: int
    stopped: int
    resumed_at: int
    earlier: int
    gradient_samples: int
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]
    waited: tuple[float, ...]
    accuracy: tuple[float, ...]
    records: tuple[Record, ...]

    @property
    def updates_per_second(self) -> float:
        """Updates applied per second of this job."""
        return (self.updates - self.resumed_at) / self.seconds

    @property
    def samples_per_second(self) -> float:
        """Samples of accepted gradients per second of this job."""
        accepted = sum(self.accepted) - self.earlier
        return accepted * self.gradient_samples / self.seconds

    @property
    def diverged(self) -> bool:
        """Whether the last loss of a model, on test samples, is not a finite number."""
        last = {record.group: record.test_loss for record in self.records}
        return not all(map(math.isfinite, last.values()))

    def lag_shares(self) -> list[float]:
        """Return the fraction of all gradients in each class of `LAG_NAMES`."""
        counts = [0] * len(_LAGS)
        for lag, count in self.lags.items():
            counts[bisect.bisect_right(_LAGS, lag) - 1] += count
        return [count / (sum(counts) or 1) for count in counts]


class Observer:
    """Evaluates a model after every epoch, or less often if evaluation is slow.

    Args:
        strategy, group: Copied to the records.
        measure: Returns the loss and the accuracy on the test samples.
        target, epochs: Number of updates in the run, and of epochs.
        show: Called with each record.

    Attributes:
        records: All records so far.
    """

    def __init__(
        self,
        strategy: str,
        group: int,
        measure: Callable[[], tuple[float, float]],
        target: int,
        epochs: int,
        show: Callable[[Record], None],
    ) -> None:
        self._names, self._measure, self._show = (strategy, group), measure, show
        self._epochs, self._target = epochs, target
        self._losses: list[float] = []
        self._next_epoch, self._quiet_until = 1.0, 0.0
        self.records: list[Record] = []

    def add(self, loss: float) -> None:
        """Add the loss of one batch to the next record."""
        self._losses.append(loss)

    def passed(self, step: int, seconds: float) -> None:
        """Evaluate the model if the next epoch is reached."""
        epoch = self._epochs * step / self._target
        if epoch < self._next_epoch or seconds < self._quiet_until:
            return
        # CPU time: other ranks may use the core meanwhile.
        begun = time.thread_time()
        self.evaluate(step, seconds)
        self._quiet_until = seconds + _PAUSE * (time.thread_time() - begun)

    def evaluate(self, step: int, seconds: float) -> None:
        """Evaluate the model and add a record."""
        epoch = self._epochs * step / self._target
        self._next_epoch = int(epoch) + 1.0
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses.clear()
        record = Record(*self._names, seconds, step, epoch, loss, *self._measure())
        self.records.append(record)
        self._show(record)

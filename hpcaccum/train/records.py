"""What is known about a run: looks at the model on the way, numbers at the end."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

# Between two looks passes at least so many times the time that one takes: looking
# costs a twentieth at most, whatever the data.
_PAUSE = 20

# Lags are shown together from each of these on, up to the next. The optimizers count
# those of 31 and more together.
_LAGS = (0, 1, 2, 3, 4, 8, 16, 31)
LAG_NAMES = ("0", "1", "2", "3", "4-7", "8-15", "16-30", "31+")


@dataclass(frozen=True)
class Record:
    """What one look at the model found.

    Attributes:
        group: Number of the shard group whose model it is; 0 if there is one model.
        seconds: Since the start.
        step: Updates applied to the parameters.
        epoch: The part of the work that is done, in epochs.
        loss: Mean over this rank's batches since its last look; None without any.
        test_loss, accuracy: With the test samples.
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
    """How one run went; the same on all ranks.

    Attributes:
        seconds: From the common start until the last rank stopped.
        updates: Applied to the parameters; by each group, if there are several.
        gradient_samples: In one gradient.
        accepted, dropped: Gradients of each rank.
        lags: How many gradients had which lag.
        waited: Seconds that each rank waited inside of the optimizer.
        accuracy: With the test samples, of each group's final model.
        records: In the order of time, group by group.
    """

    strategy: str
    seconds: float
    updates: int
    gradient_samples: int
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]
    waited: tuple[float, ...]
    accuracy: tuple[float, ...]
    records: tuple[Record, ...]

    @property
    def updates_per_second(self) -> float:
        """Updates applied in a second."""
        return self.updates / self.seconds

    @property
    def samples_per_second(self) -> float:
        """Samples of accepted gradients in a second."""
        return sum(self.accepted) * self.gradient_samples / self.seconds

    def lag_shares(self) -> list[float]:
        """Return the part of all gradients that had each of the `LAG_NAMES`."""
        counts = [0] * len(_LAGS)
        for lag, count in self.lags.items():
            counts[bisect.bisect_right(_LAGS, lag) - 1] += count
        return [count / (sum(counts) or 1) for count in counts]


class Observer:
    """Looks at a model after every epoch, if that takes little time.

    Args:
        strategy, group: For the records.
        evaluate: Returns loss and accuracy with the test samples.
        target, epochs: So many updates make so many epochs.
        show: Gets each record at once.
    """

    def __init__(
        self,
        strategy: str,
        group: int,
        evaluate: Callable[[], tuple[float, float]],
        target: int,
        epochs: int,
        show: Callable[[Record], None],
    ) -> None:
        self._names, self._evaluate, self._show = (strategy, group), evaluate, show
        self._epochs, self._target = epochs, target
        self._losses: list[float] = []
        self._next_epoch, self._quiet_until = 1.0, 0.0
        self.records: list[Record] = []

    def add(self, loss: float) -> None:
        """Remember the loss of one batch."""
        self._losses.append(loss)

    def passed(self, step: int, seconds: float) -> None:
        """Look at the model if it is time to."""
        epoch = self._epoch(step)
        if epoch < self._next_epoch or seconds < self._quiet_until:
            return
        # Not the seconds that go by while others have the processor.
        begun = time.thread_time()
        self.look(step, seconds)
        self._next_epoch = int(epoch) + 1.0
        self._quiet_until = seconds + _PAUSE * (time.thread_time() - begun)

    def _epoch(self, step: int) -> float:
        return self._epochs * step / self._target

    def look(self, step: int, seconds: float) -> None:
        """Evaluate the model and make a record."""
        loss = float(np.mean(self._losses)) if self._losses else None
        self._losses.clear()
        found = self._evaluate()
        record = Record(*self._names, seconds, step, self._epoch(step), loss, *found)
        self.records.append(record)
        self._show(record)

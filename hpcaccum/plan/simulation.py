"""Simulations of one setting, repeated with other random numbers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.errors import counted
from hpcaccum.plan.compute import Draws
from hpcaccum.plan.events import Events
from hpcaccum.plan.rounds import Rounds, allreduces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.plan.compute import Compute
    from hpcaccum.plan.machine import Machine
    from hpcaccum.plan.setting import Outcome, Setting

# Updates that come before those that count, as a part of them.
_WARM_UP = 0.2
# Gradients of each rank at least, if each makes an update.
_LEAST_GRADIENTS = 50
# How far the mean lag may be from Little's law.
_LITTLE = 0.02
# Quantiles of Student's distribution for intervals of 95 %, from 2 repeats on.
_STUDENT = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


def simulate(
    setting: Setting, machine: Machine, compute: Compute, updates: int, seed: int
) -> Outcome:
    """Simulate updates of a setting; the same ones for the same seed."""
    draws = Draws(compute, setting.node_of, seed)
    if not setting.has_server:
        return allreduces(setting, machine, draws, updates)
    kind: type[Rounds | Events] = Rounds
    if setting.quorum is None:
        kind, updates = Events, max(updates, _LEAST_GRADIENTS * setting.ranks)
    simulation = kind(setting, machine, draws)
    simulation.run(math.ceil(_WARM_UP * updates))
    return simulation.run(updates)


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one setting, by several simulations.

    The means of `Outcome.figures`, and the intervals in which they are with 95 %, None
    of one simulation; the share of time in which each rank waits; how many gradients
    had each lag; and why not to trust the prediction, in words.
    """

    setting: Setting
    means: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    waiting: list[float]
    lags: list[int]
    doubts: list[str]

    def percentile(self, percent: float) -> int:
        """Return the lag that so many percent of the gradients do not exceed."""
        lags = np.cumsum(self.lags)
        return int(np.argmax(lags >= percent / 100 * lags[-1]))

    def facts(self) -> dict[str, Any]:
        """Return what ``--json`` writes."""
        staleness = self.setting.staleness
        return {
            **vars(self.setting),
            "staleness": None if math.isinf(staleness) else staleness,
            **self.means,
            "lag_p50": self.percentile(50),
            "lag_p90": self.percentile(90),
            "lag_max": len(self.lags) - 1,
            "lags": self.lags,
            "waiting_least": min(self.waiting),
            "waiting_most": max(self.waiting),
            "memory_bytes": self.setting.memory_bytes,
            "intervals": self.intervals,
            "doubts": self.doubts,
        }


def predict(
    setting: Setting,
    machine: Machine,
    compute: Compute,
    updates: int,
    seeds: Sequence[int],
    batch: int = 1,
) -> Prediction:
    """Predict what a setting does; a gradient is that of ``batch`` samples."""
    found = [simulate(setting, machine, compute, updates, seed) for seed in seeds]
    # During a restart no rank trains.
    trains = compute.availability(setting.nodes)
    figures = [each.figures(setting.steps * batch, trains) for each in found]
    columns = {name: [each[name] for each in figures] for name in figures[0]}
    means = {name: fmean(column) for name, column in columns.items()}
    lags = sum((each.lags for each in found), Counter[int]())
    return Prediction(
        setting,
        means,
        {name: _interval(column) for name, column in columns.items()},
        np.mean([each.waiting for each in found], axis=0).tolist(),
        [lags[lag] for lag in range(max(lags) + 1)],
        list(_doubts(setting, machine, means)),
    )


def _interval(column: Sequence[float]) -> tuple[float, float] | None:
    if len(column) < 2:
        return None
    quantile = _STUDENT[min(len(column) - 1, len(_STUDENT)) - 1]
    middle, width = fmean(column), quantile * stdev(column) / math.sqrt(len(column))
    return middle - width, middle + width


def _doubts(
    setting: Setting, machine: Machine, means: dict[str, float]
) -> Iterator[str]:
    here = -(-setting.ranks // setting.nodes)
    if 0 < machine.ranks < here:
        yield f"extrapolated from {counted(machine.ranks, 'rank')} on a node to {here}"
    # Updates a second times the mean time from a pull to the admission, less the share
    # of gradients that make an update themselves.
    lag, law = means["mean_lag"], means["law"]
    if abs(lag - law) > _LITTLE * max(lag, law, 1):
        why = "ranks push together, or more --updates are needed"
        yield f"mean lag {lag:.3g}, by Little's law {law:.3g}: {why}"

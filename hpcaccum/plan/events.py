"""Asynchronous strategies: one event for each gradient, in the order of arrival.

What happens to a gradient after its admission is known at once, as links and servers
serve gradients in that order.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import admits
from hpcaccum.deadline import nap_after
from hpcaccum.plan.setting import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.plan.compute import Draws
    from hpcaccum.plan.machine import Machine
    from hpcaccum.plan.setting import Setting

# Pushes of a rank that are drawn at a time.
_AT_A_TIME = 64
# Versions that a node remembers at least.
_LEAST = 1024


class Versions:
    """The parameters that a node has had: steps, and when each was there.

    Args:
        starts: When each rank of the node has pulled; no older version is needed.
        ranks: Of the node.
    """

    def __init__(self, starts: list[float], ranks: range) -> None:
        self._starts, self._ranks, self._limit = starts, ranks, _LEAST
        self.times, self.steps, self.admitted = [0.0], [0], [0.0]

    def add(self, time: float, step: int, admitted: float) -> None:
        """Add a version, which is newer than all others."""
        self.times.append(time)
        self.steps.append(step)
        self.admitted.append(admitted)
        if len(self.times) > self._limit:
            starts = self._starts[self._ranks.start : self._ranks.stop]
            old = bisect_right(self.times, min(starts)) - 1
            for each in (self.times, self.steps, self.admitted):
                del each[:old]
            self._limit = max(_LEAST, 2 * len(self.times))

    def at(self, time: float) -> int:
        """Return the place of the newest version at a time."""
        return bisect_right(self.times, time) - 1


class Events:
    """Updates of one gradient each, if it is not more than ``staleness`` late."""

    def __init__(
        self, setting: Setting, machine: Machine, draws: Draws, rng: np.random.Generator
    ) -> None:
        self._setting, self._machine = setting, machine
        self._draws, n = draws, setting.ranks
        self._node_of = setting.node_of.tolist()
        self._starts = [0.0] * n
        bounds = np.searchsorted(setting.node_of, np.arange(setting.nodes + 1)).tolist()
        self._versions = [
            Versions(self._starts, range(*ends)) for ends in itertools.pairwise(bounds)
        ]
        drawn = draws.draw(np.arange(n), _AT_A_TIME * setting.steps)
        drawn = drawn.reshape(n, _AT_A_TIME, setting.steps).sum(axis=2)
        self._drawn: list[Iterator[float]] = [iter(each) for each in drawn.tolist()]
        self._computing, self._took = [0.0] * n, [0.0] * n
        self._uniform = self._random(rng.random)
        self._exponential = self._random(rng.standard_exponential)
        self._heap = list[tuple[float, int]]()
        for rank in range(n):
            self._heap.append((self._begin(rank, 0.0), rank))
        heapq.heapify(self._heap)
        self._step, self._lags, self._dropped = 0, [0] * 32, 0
        # Until when each is busy; how long they were.
        self._word = self._inward = self._server = self._outward = 0.0
        self._served = self._carried = self._since_pull = 0.0

    def _random(self, draw: Callable[[int], Any]) -> Iterator[float]:
        while True:
            yield from draw(4096).tolist()

    def _begin(self, rank: int, start: float) -> float:
        """Begin a gradient; return when it arrives."""
        drawn = next(self._drawn[rank], -1.0)
        if drawn < 0:
            steps = self._setting.steps
            more = self._draws.draw(np.array([rank]), _AT_A_TIME * steps)
            sums = more.reshape(_AT_A_TIME, steps).sum(axis=1).tolist()
            self._drawn[rank] = iter(sums)
            drawn = next(self._drawn[rank])
        self._starts[rank], self._took[rank] = start, drawn
        machine = self._machine
        away = machine.latency if self._node_of[rank] else 0.0
        calls = machine.call * (next(self._exponential) + self._setting.steps - 1)
        return start + drawn + calls + machine.moved(self._setting) + away

    def run(self, updates: int, warm_up: int) -> Outcome:
        """Simulate updates; those of the warm-up are not counted."""
        while self._step < warm_up:
            self._arrive()
        begun = self._word
        self._lags, self._dropped = [0] * len(self._lags), 0
        self._served = self._carried = self._since_pull = 0.0
        self._computing = [0.0] * self._setting.ranks
        while self._step < warm_up + updates:
            self._arrive()
        seconds = self._word - begun
        lags = np.array(self._lags)
        arrived = int(lags.sum())
        # The interval of an accepted gradient includes its own admission.
        passed = updates / seconds * self._since_pull / arrived
        return Outcome(
            seconds,
            updates,
            lags,
            self._dropped,
            np.array(self._computing),
            self._served,
            self._carried,
            passed - updates / arrived,
        )

    def _arrive(self) -> None:
        """Admit or drop the next gradient that arrives."""
        arrives, rank = self._heap[0]
        node = self._node_of[rank]
        versions = self._versions[node]
        place = versions.at(self._starts[rank])
        now = self._word = max(self._word, arrives) + self._machine.turn
        self._since_pull += now - versions.admitted[place]
        self._computing[rank] += self._took[rank]
        local = versions.steps[place]
        lag = self._step - local
        while lag >= len(self._lags):
            self._lags += [0] * len(self._lags)
        self._lags[lag] += 1
        if admits(self._step, local, self._setting.staleness):
            self._step += 1
            there = self._update(now, node)
            late = nap_after(there - now) * next(self._uniform)
        else:
            self._dropped += 1
            there, late = self._useful(now, node), 0.0
        machine = self._machine
        start = there + late + machine.moved(self._setting)
        heapq.heapreplace(self._heap, (self._begin(rank, start), rank))

    def _update(self, now: float, node: int) -> float:
        """Make an update of a gradient; return when its node has the parameters."""
        machine, setting = self._machine, self._setting
        crossing, arrived = machine.crossing(setting), now
        if node:
            self._inward = max(self._inward, now + machine.latency) + crossing
            self._carried += crossing
            arrived = self._inward
        if arrived > self._server:
            arrived += nap_after(arrived - self._server) * next(self._uniform)
        took = machine.updating(setting, 1)
        self._served += took
        self._server = made = max(self._server, arrived) + took
        self._versions[0].add(made, self._step, now)
        if node:
            self._outward = max(self._outward, made) + crossing
            made = self._outward + machine.latency
            self._versions[node].add(made, self._step, now)
        return made

    def _useful(self, now: float, node: int) -> float:
        """Return when a rank whose gradient was dropped has parameters of use."""
        versions = self._versions[0]
        place = self._step - int(self._setting.staleness) - versions.steps[0]
        there = versions.times[place] if place > 0 else 0.0
        away = 2 * self._machine.latency if node else 0.0
        return max(now, there) + away

"""Synchronous strategies: all ranks of a round at once, as NumPy vectors."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.accumulator import admits
from hpcaccum.plan.machine import napped
from hpcaccum.plan.setting import Outcome

if TYPE_CHECKING:
    from hpcaccum.plan.compute import Draws, Floats, Ints
    from hpcaccum.plan.machine import Machine
    from hpcaccum.plan.setting import Setting

# Gradients drawn at a time for `allreduces`: 8 MB.
_AT_A_TIME = 1 << 20


def allreduces(
    setting: Setting, machine: Machine, draws: Draws, updates: int
) -> Outcome:
    """Simulate updates for which all ranks wait for each other."""
    n, left = setting.ranks, updates
    everybody = np.arange(n)
    found = Outcome(updates, np.zeros(n), Counter({0: n * updates}))
    while left:
        count = min(left, max(1, _AT_A_TIME // n))
        drawn = draws.draw(everybody, count)
        found.computing += drawn.sum(axis=1)
        drawn += draws.rng.exponential(machine.call, drawn.shape)
        longest = drawn.max(axis=0)
        # The first that has waited notices last that all have arrived.
        late = napped(longest - drawn.min(axis=0), np.full(count, n / (n + 1)))
        found.seconds += float((longest + late).sum())
        left -= count
    crossing = 2 * (setting.nodes - 1) / setting.nodes * setting.nbytes / machine.link
    found.seconds += updates * machine.reducing(setting)
    found.link = updates * crossing
    return found


class Rounds:
    """Updates with the mean of a quorum of gradients; others are dropped.

    The rule is that of the accumulator: a gradient counts if `admits` says so when it
    arrives, the last one of a quorum closes the round, and its ranks wait.
    """

    def __init__(self, setting: Setting, machine: Machine, draws: Draws) -> None:
        self._setting, self._machine, self._rng = setting, machine, draws.rng
        self._draws, self._everybody = draws, np.arange(setting.ranks)
        self._quorum, self._node_of = setting.quorum or 1, setting.node_of
        self._crossing = machine.crossing(setting)
        # The step, and when it was published.
        self._step, self._published = 0, 0.0
        # The next gradient of each rank: its step, when it arrives, how long it took.
        self._local = np.zeros(setting.ranks, np.int64)
        self._arrives, self._took = self._next(self._everybody, np.zeros(1))

    def _next(self, ranks: Ints, begin: Floats) -> tuple[Floats, Floats]:
        """Return when gradients arrive that are begun at some times; and their time."""
        drawn = self._draws.draw(ranks, self._setting.steps).sum(axis=1)
        calls = self._rng.standard_gamma(self._setting.steps, len(ranks))
        calls *= self._machine.call
        return begin + drawn + calls + self._machine.moved(self._setting), drawn

    def run(self, updates: int) -> Outcome:
        """Simulate as many updates more."""
        self._found = found = Outcome(updates, np.zeros(self._setting.ranks))
        begun = self._published
        for _ in range(updates):
            self._round()
        found.seconds = self._published - begun
        overtaken = updates * (self._setting.ranks - self._quorum)
        found.law = overtaken / found.lags.total()
        return found

    def _count(self, ranks: Ints) -> None:
        """Count the gradients of ranks, which arrive, and the time they took."""
        lags = np.bincount(self._step - self._local[ranks])
        self._found.lags.update(dict(enumerate(lags.tolist())))
        self._found.computing[ranks] += self._took[ranks]

    def _round(self) -> None:
        fresh = admits(self._step, self._local, self._setting.staleness)
        arrives = np.where(fresh, self._arrives, np.inf)
        closes, chosen = self._closing(arrives)
        # Stale gradients that arrive before are dropped, and their ranks begin anew.
        stale = self._everybody[~fresh & (self._arrives < closes)]
        if stale.size:
            begin = np.maximum(self._arrives[stale], self._published)
            away = self._crossing + 2 * self._machine.latency
            begin += away * (self._node_of[stale] > 0)
            again, took = self._next(stale, begin)
            arrives[stale] = again
            closes, chosen = self._closing(arrives)
            begun = self._arrives[stale] < closes
            stale = stale[begun]
            self._count(stale)
            self._found.dropped += stale.size
            self._local[stale] = self._step
            self._arrives[stale], self._took[stale] = again[begun], took[begun]
        self._count(chosen)
        self._close(closes, chosen)

    def _closing(self, arrives: Floats) -> tuple[float, Ints]:
        """Return when the quorum is complete, and its ranks."""
        chosen = np.argpartition(arrives, self._quorum - 1)[: self._quorum]
        # They are admitted one after the other.
        turns = self._machine.turn * np.arange(self._quorum)
        closes = (np.sort(arrives[chosen]) - turns).max() + turns[-1]
        return float(closes + self._machine.turn), chosen

    def _close(self, closes: float, waits: Ints) -> None:
        """Make the update, and let the ranks that wait for it begin."""
        machine, setting, uniform = self._machine, self._setting, self._rng.random
        # Late gradients alone may be a quorum, before the last update is made.
        closes = max(closes, self._published)
        idle = np.array([closes - self._published])
        notices = closes + float(napped(idle, uniform(1))[0])
        # The server gets one sum of each node, and sends the parameters back in turns.
        nodes = self._node_of[waits]
        others = self._rng.permutation(np.unique(nodes[nodes > 0]))
        turns = np.zeros(setting.nodes)
        turns[others] = np.arange(1, others.size + 1) * self._crossing + machine.latency
        updating = machine.updating(setting, np.sum(nodes == 0) + others.size)
        self._found.server += updating
        self._found.link += others.size * self._crossing
        self._published = notices + turns.max() + updating
        self._step += 1
        began = napped(self._published - self._arrives[waits], uniform(waits.size))
        began += machine.answer * self._rng.standard_exponential(waits.size)
        began += self._published + turns[nodes]
        began += waits.size / setting.nodes * machine.moved(setting)
        self._arrives[waits], self._took[waits] = self._next(waits, began)
        self._local[waits] = self._step

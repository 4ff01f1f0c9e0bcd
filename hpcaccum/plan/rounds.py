"""Synchronous strategies: all ranks of a round at once, as NumPy vectors."""

from __future__ import annotations

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
    setting: Setting,
    machine: Machine,
    draws: Draws,
    updates: int,
    rng: np.random.Generator,
) -> Outcome:
    """Simulate updates for which all ranks wait for each other."""
    n, computing, seconds = setting.ranks, np.zeros(setting.ranks), 0.0
    everybody, left = np.arange(n), updates
    while left:
        count = min(left, max(1, _AT_A_TIME // n))
        drawn = draws.draw(everybody, count)
        computing += drawn.sum(axis=1)
        drawn += rng.exponential(machine.call, drawn.shape)
        longest = drawn.max(axis=0)
        # The first that has waited notices last that all have arrived.
        late = napped(longest - drawn.min(axis=0), np.full(count, n / (n + 1)))
        seconds += float((longest + late).sum())
        left -= count
    took = machine.reducing(setting)
    seconds += updates * took
    crossing = 2 * (setting.nodes - 1) / setting.nodes * setting.nbytes / machine.link
    lags = np.array([n * updates])
    return Outcome(seconds, updates, lags, 0, computing, 0.0, updates * crossing)


class Rounds:
    """Updates with the mean of a quorum of gradients; others are dropped.

    The rule is that of the accumulator: a gradient counts if `admits` says so when it
    arrives, and the last one of a quorum closes the round. Each rank gives as many
    gradients to a round as the quorum needs of each, then waits for the update.
    """

    def __init__(
        self, setting: Setting, machine: Machine, draws: Draws, rng: np.random.Generator
    ) -> None:
        self._setting, self._machine, self._rng = setting, machine, rng
        self._draws, n = draws, setting.ranks
        assert setting.quorum is not None
        self._quorum, self._share = setting.quorum, -(-setting.quorum // n)
        self._everybody, self._node_of = np.arange(n), setting.node_of
        self._push = machine.moved(setting)
        # Sums come to the servers from all other nodes, and parameters go back.
        others = setting.nodes - 1
        self._across = others * machine.crossing(setting)
        self._across += machine.latency * (others > 0)
        # The step, and when it was published.
        self._step, self._published = 0, 0.0
        self._computing = np.zeros(n)
        self._lags, self._overtaken = np.zeros(32, np.int64), 0
        self._dropped, self._server = 0, 0.0
        # The next gradient of each rank: its step, when it arrives, how long it took.
        self._local = np.zeros(n, np.int64)
        self._arrives, self._took = self._next(self._everybody, np.zeros(n))

    def _next(self, ranks: Ints, begin: Floats) -> tuple[Floats, Floats]:
        """Return when gradients arrive that are begun at some times; and their time."""
        drawn = self._draws.draw(ranks, self._setting.steps).sum(axis=1)
        calls = self._rng.exponential(self._machine.call, len(ranks))
        return begin + drawn + calls + self._push, drawn

    def run(self, updates: int, warm_up: int) -> Outcome:
        """Simulate updates; those of the warm-up are not counted."""
        for _ in range(warm_up):
            self._round()
        begun = self._published
        for counts in (self._lags, self._computing):
            counts[:] = 0
        self._overtaken, self._dropped, self._server = 0, 0, 0.0
        for _ in range(updates):
            self._round()
        return Outcome(
            self._published - begun,
            updates,
            self._lags,
            self._dropped,
            self._computing,
            self._server,
            updates * self._across,
            self._overtaken / max(int(self._lags.sum()), 1),
        )

    def _count(self, ranks: Ints, took: Floats) -> None:
        """Count gradients that arrive: their lag, and the time they took."""
        found = np.bincount(self._step - self._local[ranks])
        if len(found) > len(self._lags):
            self._lags = np.pad(self._lags, (0, 2 * len(found) - len(self._lags)))
        self._lags[: len(found)] += found
        np.add.at(self._computing, ranks, took)

    def _round(self) -> None:
        fresh = admits(self._step, self._local, self._setting.staleness)
        shape = self._setting.ranks, self._share
        arrives, took = np.full(shape, np.inf), np.zeros(shape)
        first = self._everybody[fresh]
        self._fill(arrives, took, first, self._arrives[first], self._took[first])
        closes, _ = self._closing(arrives)
        # Stale gradients that arrive before are dropped, and their ranks begin anew.
        stale = self._everybody[~fresh & (self._arrives < closes)]
        if stale.size:
            begin = np.maximum(self._arrives[stale], self._published)
            again = self._next(stale, begin)
            self._fill(arrives, took, stale, *again)
            closes, _ = self._closing(arrives)
            begun = self._arrives[stale] < closes
            arrives[stale[~begun]] = np.inf
            stale = stale[begun]
            self._count(stale, self._took[stale])
            self._dropped += stale.size
            self._local[stale] = self._step
            self._arrives[stale], self._took[stale] = arrives[stale, 0], took[stale, 0]
        self._close(arrives, took)

    def _fill(
        self, arrives: Floats, took: Floats, ranks: Ints, first: Floats, drawn: Floats
    ) -> None:
        """Set what ranks give to this round, as long as it is open."""
        for place in range(self._share):
            if place:
                first, drawn = self._next(ranks, first)
            arrives[ranks, place], took[ranks, place] = first, drawn

    def _closing(self, arrives: Floats) -> tuple[float, Ints]:
        """Return when the quorum is complete, and the places of its gradients."""
        flat, last = arrives.ravel(), self._quorum - 1
        chosen = np.argpartition(flat, last)[: self._quorum]
        if not np.isfinite(flat[chosen]).all():
            return np.inf, chosen
        # They are admitted one after the other.
        turns = self._machine.turn * np.arange(self._quorum)
        waited = (np.sort(flat[chosen]) - turns).max()
        return float(waited + turns[-1] + self._machine.turn), chosen

    def _close(self, arrives: Floats, took: Floats) -> None:
        """Make the update, and let the ranks that wait for it begin."""
        machine, setting = self._machine, self._setting
        closes, chosen = self._closing(arrives)
        gave = chosen // self._share
        self._count(gave, took.ravel()[chosen])
        given = np.bincount(gave, minlength=setting.ranks)
        done = given == self._share
        # These compute when the round closes: another gradient of a step that is over.
        more = self._everybody[(given > 0) & ~done]
        place = more, given[more]
        self._arrives[more], self._took[more] = arrives[place], took[place]
        self._overtaken += int((~done).sum())

        updating = machine.updating(setting, min(self._quorum, setting.ranks))
        self._server += updating
        idle, uniform = np.array([closes - self._published]), self._rng.random
        notices = closes + float(napped(idle, uniform(1))[0])
        self._published = notices + self._across + updating
        self._step += 1
        waits = self._everybody[done]
        began = napped(self._published - arrives[waits, -1], uniform(waits.size))
        began += self._published
        began += waits.size * machine.moved(setting)
        began += self._across * (self._node_of[waits] > 0)
        self._arrives[waits], self._took[waits] = self._next(waits, began)
        self._local[waits] = self._step

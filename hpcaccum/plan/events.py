"""Asynchronous strategies: one event for each gradient, in the order of arrival.

What happens to a gradient after its admission is known at once, as links and servers
serve gradients in that order.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
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


class Link:
    """The link of a node in one direction.

    What is sent later may be announced earlier: it then leaves gaps for others.

    Attributes:
        carried: Seconds for which it was used.
    """

    def __init__(self) -> None:
        self.carried, self._free = 0.0, 0.0
        # When gaps begin and end, in order.
        self._begins, self._ends = list[float](), list[float]()

    def carry(self, now: float, start: float, took: float) -> float:
        """Use it for some seconds, from ``start`` on; return when they end.

        Nothing is sent before ``now``, which never decreases.
        """
        self.carried += took
        if start >= self._free:
            old = bisect_right(self._ends, now)
            del self._begins[:old], self._ends[:old]
            self._begins.append(self._free)
            self._ends.append(start)
            self._free = start + took
            return self._free
        # Data are sent in packets, so a gap need not hold all of them.
        place = bisect_right(self._ends, start)
        while place < len(self._ends):
            first = max(self._begins[place], start)
            used = min(took, self._ends[place] - first)
            self._begins[place] = first + used
            took -= used
            if not took:
                return first + used
            place += 1
        self._free += took
        return self._free


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
        self._word = self._busy = self._served = self._since_pull = 0.0
        self._inward = [Link() for _ in range(setting.nodes)]
        self._outward = [Link() for _ in range(setting.nodes)]
        self._pushes = itertools.count()

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
        self._served = self._since_pull = 0.0
        for link in self._inward + self._outward:
            link.carried = 0.0
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
            max(link.carried for link in self._inward + self._outward),
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
        machine, arrived, server = self._machine, now, self._server_for(node)
        if crossing := self._crossing(node):
            arrived = self._cross(now + machine.latency, node, server, crossing)
        if arrived > self._busy:
            arrived += nap_after(arrived - self._busy) * next(self._uniform)
        took = machine.updating(self._setting, 1)
        self._served += took
        self._busy = made = max(self._busy, arrived) + took
        self._versions[0].add(made, self._step, now)
        return self._pull(made, node, server, self._step, now)

    def _useful(self, now: float, node: int) -> float:
        """Return when a rank whose gradient was dropped has parameters of use."""
        needed, known = self._step - int(self._setting.staleness), self._versions[node]
        place = bisect_left(known.steps, needed)
        if place < len(known.steps):
            return max(now, known.times[place])
        served, server = self._versions[0], self._server_for(node)
        asked = now + self._machine.latency
        there = max(asked, served.times[bisect_left(served.steps, needed)])
        place = served.at(there)
        return self._pull(
            there, node, server, served.steps[place], served.admitted[place]
        )

    def _pull(
        self, start: float, node: int, server: int, step: int, admitted: float
    ) -> float:
        """Send a version to a node; return when it is there."""
        if crossing := self._crossing(node):
            start = self._cross(start, server, node, crossing) + self._machine.latency
        if node:
            start = max(start, self._versions[node].times[-1])
            self._versions[node].add(start, step, admitted)
        return start

    def _crossing(self, node: int) -> float:
        """Return seconds in which a node sends a gradient to servers of other nodes."""
        servers = self._setting.servers
        return (servers - (node < servers)) * self._machine.crossing(self._setting)

    def _server_for(self, node: int) -> int:
        """Return the node of a server that gets all of a gradient.

        In fact, each gets a part. But in turns, links carry the same.
        """
        server = next(self._pushes) % self._setting.servers
        return (server + (server == node)) % self._setting.servers

    def _cross(self, start: float, source: int, target: int, took: float) -> float:
        """Send data between nodes; return when they are there."""
        # They enter one link while they leave the other.
        left = self._outward[source].carry(self._word, start, took)
        return max(left, self._inward[target].carry(self._word, start, took))

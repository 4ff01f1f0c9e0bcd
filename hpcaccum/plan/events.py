"""Asynchronous strategies: one event for each gradient, in the order of arrival.

What happens to a gradient after its admission is known at once, as links and servers
serve gradients in that order.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import admits
from hpcaccum.deadline import nap_after
from hpcaccum.plan.setting import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.plan.compute import Draws, Ints
    from hpcaccum.plan.machine import Machine
    from hpcaccum.plan.setting import Setting

# Pushes of a rank that are drawn at a time.
_AT_A_TIME = 64
# Versions that a node remembers at least.
_LEAST = 1024
_time, _step = operator.attrgetter("time"), operator.attrgetter("step")
_end = operator.itemgetter(1)


class Version(NamedTuple):
    """Parameters of a node: since when, of which step, and when that was admitted."""

    time: float
    step: int
    admitted: float


class Versions:
    """The parameters that a node has had, in order, since the oldest of the starts."""

    def __init__(self, starts: list[float]) -> None:
        self._starts, self._limit = starts, _LEAST
        self.all = [Version(0.0, 0, 0.0)]

    def add(self, version: Version) -> None:
        """Add a version, which is newer than all others."""
        self.all.append(version)
        if len(self.all) > self._limit:
            del self.all[: self._place(min(self._starts))]
            self._limit = max(_LEAST, 2 * len(self.all))

    def _place(self, time: float) -> int:
        return bisect_right(self.all, time, key=_time) - 1

    def at(self, time: float) -> Version:
        """Return the newest version at a time."""
        return self.all[self._place(time)]

    def since(self, step: int) -> list[Version]:
        """Return the first version of at least a step, if there is one."""
        place = bisect_left(self.all, step, key=_step)
        return self.all[place : place + 1]


class Link:
    """The link of a node in one direction; ``carried`` is how long it was used."""

    def __init__(self) -> None:
        self.carried, self._free = 0.0, 0.0
        # What is sent later may be announced earlier: it then leaves gaps for others.
        # When they begin and end, in order.
        self._gaps = list[list[float]]()

    def carry(self, now: float, start: float, took: float) -> float:
        """Use it for some seconds, from ``start`` on; return when they end.

        Nothing is sent before ``now``, which never decreases.
        """
        self.carried += took
        if start >= self._free:
            del self._gaps[: bisect_right(self._gaps, now, key=_end)]
            self._gaps.append([self._free, start])
            self._free = start + took
            return self._free
        # Data are sent in packets, so a gap need not hold all of them.
        for gap in self._gaps[bisect_right(self._gaps, start, key=_end) :]:
            first = max(gap[0], start)
            used = min(took, gap[1] - first)
            gap[0] = first + used
            took -= used
            if not took:
                return gap[0]
        self._free += took
        return self._free


class Events:
    """Updates of one gradient each, if it is not more than ``staleness`` late."""

    def __init__(self, setting: Setting, machine: Machine, draws: Draws) -> None:
        self._setting, self._machine, self._draws = setting, machine, draws
        n, nodes, self._node_of = setting.ranks, setting.nodes, setting.node_of.tolist()
        self._starts, self._took = [0.0] * n, [0.0] * n
        self._versions = [Versions(self._starts) for _ in range(nodes)]
        self._drawn = [self._times(np.array([rank])) for rank in range(n)]
        self._uniform = self._random(draws.rng.random)
        self._exponential = self._random(draws.rng.standard_exponential)
        gamma = functools.partial(draws.rng.standard_gamma, setting.steps)
        self._calls = self._random(gamma)
        self._heap = [(self._begin(rank, 0.0), rank) for rank in range(n)]
        heapq.heapify(self._heap)
        # Until when the word of the step, and the server, are busy.
        self._step, self._word, self._busy = 0, 0.0, 0.0
        self._inward = [Link() for _ in range(nodes)]
        self._outward = [Link() for _ in range(nodes)]
        # The seconds in which a node sends a gradient to the servers of other nodes.
        servers, crossing = setting.servers, machine.crossing(setting)
        others = [servers - (node < servers) for node in range(nodes)]
        self._crossings = [each * crossing for each in others]
        self._servers = itertools.cycle(range(servers))

    def _times(self, rank: Ints) -> Iterator[float]:
        """Yield what a rank computes for each push."""
        shape = _AT_A_TIME, self._setting.steps
        while True:
            drawn = self._draws.draw(rank, math.prod(shape))
            yield from drawn.reshape(shape).sum(axis=1).tolist()

    def _random(self, draw: Callable[[int], Any]) -> Iterator[float]:
        while True:
            yield from draw(4096).tolist()

    def _begin(self, rank: int, start: float) -> float:
        """Begin a gradient; return when it arrives."""
        self._starts[rank], self._took[rank] = start, next(self._drawn[rank])
        machine = self._machine
        away = machine.latency if self._node_of[rank] else 0.0
        calls = machine.call * next(self._calls)
        return start + self._took[rank] + calls + machine.moved(self._setting) + away

    def run(self, updates: int) -> Outcome:
        """Simulate as many updates more."""
        self._found = found = Outcome(updates, np.zeros(self._setting.ranks))
        begun, last, self._since_pull = self._word, self._step + updates, 0.0
        links = self._inward + self._outward
        for link in links:
            link.carried = 0.0
        while self._step < last:
            self._arrive()
        found.seconds = self._word - begun
        found.link = max(link.carried for link in links)
        # The interval of an accepted gradient includes its own admission.
        accepted = updates / found.lags.total()
        found.law = accepted * (self._since_pull / found.seconds - 1)
        return found

    def _arrive(self) -> None:
        """Admit or drop the next gradient that arrives."""
        arrives, rank = self._heap[0]
        node, machine = self._node_of[rank], self._machine
        pulled = self._versions[node].at(self._starts[rank])
        now = self._word = max(self._word, arrives) + machine.turn
        self._since_pull += now - pulled.admitted
        self._found.computing[rank] += self._took[rank]
        self._found.lags[self._step - pulled.step] += 1
        if admits(self._step, pulled.step, self._setting.staleness):
            self._step += 1
            start = self._update(now, node)
            start += nap_after(start - now) * next(self._uniform)
            start += machine.answer * next(self._exponential)
        else:
            self._found.dropped += 1
            start = self._useful(now, node)
        start += machine.moved(self._setting)
        heapq.heapreplace(self._heap, (self._begin(rank, start), rank))

    def _update(self, now: float, node: int) -> float:
        """Make an update of a gradient; return when its node has the parameters."""
        arrived, server = now, self._server_for(node)
        if took := self._crossings[node]:
            arrived = self._cross(now + self._machine.latency, node, server, took)
        if arrived > self._busy:
            arrived += nap_after(arrived - self._busy) * next(self._uniform)
        took = self._machine.updating(self._setting, 1)
        self._found.server += took
        self._busy = max(self._busy, arrived) + took
        made = Version(self._busy, self._step, now)
        self._versions[0].add(made)
        return self._pull(made, node, server)

    def _useful(self, now: float, node: int) -> float:
        """Return when a rank whose gradient was dropped has parameters of use."""
        needed = self._step - int(self._setting.staleness)
        for known in self._versions[node].since(needed):
            return max(now, known.time)
        served = self._versions[0]
        (made,) = served.since(needed)
        asked = max(now + self._machine.latency, made.time)
        newest = served.at(asked)._replace(time=asked)
        return self._pull(newest, node, self._server_for(node))

    def _pull(self, made: Version, node: int, server: int) -> float:
        """Send a version to a node; return when it is there."""
        there = made.time
        if took := self._crossings[node]:
            there = self._cross(there, server, node, took) + self._machine.latency
        if node:
            there = max(there, self._versions[node].all[-1].time)
            self._versions[node].add(made._replace(time=there))
        return there

    def _server_for(self, node: int) -> int:
        """Return the node of a server that gets all of a gradient.

        In fact, each gets a part. But in turns, links carry the same.
        """
        server = next(self._servers)
        return (server + (server == node)) % self._setting.servers

    def _cross(self, start: float, source: int, target: int, took: float) -> float:
        """Send data between nodes; return when they are there."""
        # They enter one link while they leave the other.
        left = self._outward[source].carry(self._word, start, took)
        return max(left, self._inward[target].carry(self._word, start, took))

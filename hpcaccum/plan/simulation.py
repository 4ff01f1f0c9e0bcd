"""Simulations: synchronous strategies by rounds, asynchronous ones by events.

There is one event for each gradient, in the order of arrival: what happens to it after
its admission is known at once, as links and servers serve gradients in that order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import admits
from hpcaccum.deadline import nap_after
from hpcaccum.plan.compute import Draws
from hpcaccum.plan.setting import napped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.plan.compute import Compute, Floats, Ints
    from hpcaccum.plan.setting import Machine, Setting

# Updates that come before those that count, as a part of them.
_WARM_UP = 0.2
# Gradients of each rank at least, if each makes an update.
_LEAST_GRADIENTS = 50
# Gradients drawn at a time for all ranks, 8 MB; pushes of one rank; other numbers.
_GRADIENTS, _PUSHES, _NUMBERS = 1 << 20, 64, 4096
# Versions that a node remembers at least.
_VERSIONS = 1024
_time, _step = operator.attrgetter("time"), operator.attrgetter("step")
_end = operator.itemgetter(1)


@dataclass
class Outcome:
    """What a simulation finds, of as many updates."""

    updates: int
    # Seconds that each rank has computed; how many gradients had each lag.
    computing: Floats
    lags: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    # Seconds of updates, of data on the busiest link in one direction, and of all.
    server: float = 0.0
    link: float = 0.0
    seconds: float = 0.0
    law: float = 0.0  # the mean lag by Little's law

    @property
    def waiting(self) -> Floats:
        """The share of time in which each rank did not compute."""
        return np.clip(1 - self.computing / self.seconds, 0, 1)

    def figures(self, samples: int, trains: float) -> dict[str, float]:
        """Return what is shown, of pushes of samples, and of a part of the time."""
        arrived = self.lags.total()
        accepted = arrived - self.dropped
        return {
            "updates_per_second": self.updates / self.seconds * trains,
            "samples_per_second": accepted * samples / self.seconds * trains,
            "dropped": self.dropped / arrived,
            "mean_lag": sum(lag * n for lag, n in self.lags.items()) / arrived,
            "waiting": float(self.waiting.mean()),
            "busiest_link": self.link / self.seconds,
            "server_utilisation": self.server / self.seconds,
            "law": self.law,
        }


def simulate(
    setting: Setting, machine: Machine, compute: Compute, updates: int, seed: int
) -> Outcome:
    """Simulate updates of a setting; the same ones for the same seed."""
    draws = Draws(compute, setting.node_of, seed)
    if not setting.has_server:
        return allreduce(setting, machine, draws, updates)
    kind: type[Rounds | Events] = Rounds
    if setting.quorum is None:
        kind, updates = Events, max(updates, _LEAST_GRADIENTS * setting.ranks)
    simulation = kind(setting, machine, draws)
    simulation.run(math.ceil(_WARM_UP * updates))
    return simulation.run(updates)


def allreduce(
    setting: Setting, machine: Machine, draws: Draws, updates: int
) -> Outcome:
    """Simulate updates for which all ranks wait for each other."""
    n, left = setting.ranks, updates
    found = Outcome(updates, np.zeros(n), Counter({0: n * updates}))
    while left:
        count = min(left, max(1, _GRADIENTS // n))
        took, until = draws.pushes(np.arange(n), count, 1, machine.call)
        found.computing += took.sum(axis=1)
        longest = until.max(axis=0)
        # The first that has waited notices last that all have arrived.
        late = napped(longest - until.min(axis=0), np.full(count, n / (n + 1)))
        found.seconds += float((longest + late).sum())
        left -= count
    crossing = 2 * (setting.nodes - 1) / setting.nodes * setting.nbytes / machine.link
    found.seconds += updates * machine.reducing(setting)
    found.link = updates * crossing
    return found


class Rounds:
    """Updates with the mean of a quorum of gradients, whose ranks wait for the last."""

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
        setting, machine = self._setting, self._machine
        took, until = self._draws.pushes(ranks, 1, setting.steps, machine.call)
        return begin + until[:, 0] + machine.moved(setting, setting.steps), took[:, 0]

    def run(self, updates: int) -> Outcome:
        """Simulate as many updates more."""
        self._found = found = Outcome(updates, np.zeros(self._setting.ranks))
        begun = self._published
        for _ in range(updates):
            self._round()
        found.seconds = self._published - begun
        found.law = updates * (self._setting.ranks - self._quorum) / found.lags.total()
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
        began += machine.call * self._rng.standard_exponential(waits.size)
        began += self._published + turns[nodes]
        began += waits.size / setting.nodes * machine.moved(setting)
        self._arrives[waits], self._took[waits] = self._next(waits, began)
        self._local[waits] = self._step


class Version(NamedTuple):
    """Parameters of a node: since when, of which step, and when that was admitted."""

    time: float
    step: int
    admitted: float


class Versions:
    """The parameters that a node has had, in order, since the oldest of the starts."""

    def __init__(self, starts: list[float]) -> None:
        self._starts, self._limit = starts, _VERSIONS
        self.all = [Version(0.0, 0, 0.0)]

    def add(self, version: Version) -> None:
        """Add a version, which is newer than all others."""
        self.all.append(version)
        if len(self.all) > self._limit:
            del self.all[: self._place(min(self._starts))]
            self._limit = max(_VERSIONS, 2 * len(self.all))

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
        # What is sent later may be announced earlier: beginning and end of each gap.
        self._gaps = list[list[float]]()

    def carry(self, now: float, start: float, took: float) -> float:
        """Use it from ``start`` on; return when that ends. ``now`` never decreases."""
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
        # By rank: when it pulled, what it computes, and its last arrival.
        self._starts, self._took, self._last = ([0.0] * n for _ in range(3))
        self._versions = [Versions(self._starts) for _ in range(nodes)]
        self._pushes = [self._pushes_of(np.array([rank])) for rank in range(n)]
        self._uniform = self._random(draws.rng.random)
        self._exponential = self._random(draws.rng.standard_exponential)
        self._heap = [(self._begin(rank, 0.0), rank) for rank in range(n)]
        heapq.heapify(self._heap)
        # Until when the word of the step, and the server, are busy.
        self._step, self._word, self._busy = 0, 0.0, 0.0
        self._inward, self._outward = ([Link() for _ in range(nodes)] for _ in range(2))
        # The seconds in which a node sends a gradient to the servers of other nodes.
        servers, crossing = setting.servers, machine.crossing(setting)
        others = [servers - (node < servers) for node in range(nodes)]
        self._crossings = [each * crossing for each in others]
        self._servers = itertools.cycle(range(servers))

    def _pushes_of(self, rank: Ints) -> Iterator[tuple[float, float]]:
        steps, call = self._setting.steps, self._machine.call
        while True:
            took, until = self._draws.pushes(rank, _PUSHES, steps, call)
            yield from zip(took[0].tolist(), until[0].tolist(), strict=True)

    def _random(self, draw: Callable[[int], Any]) -> Iterator[float]:
        while True:
            yield from draw(_NUMBERS).tolist()

    def _begin(self, rank: int, start: float) -> float:
        """Begin a gradient; return when it arrives."""
        setting, machine = self._setting, self._machine
        self._starts[rank] = start
        self._took[rank], until = next(self._pushes[rank])
        away = machine.latency if self._node_of[rank] else 0.0
        return start + until + machine.moved(setting, setting.steps) + away

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
        # No update came between the newest version and a gradient that was dropped.
        self._since_pull += now - max(pulled.admitted, self._last[rank])
        self._last[rank] = now
        self._found.computing[rank] += self._took[rank]
        self._found.lags[self._step - pulled.step] += 1
        if admits(self._step, pulled.step, self._setting.staleness):
            self._step += 1
            start = self._update(now, node)
            start += nap_after(start - now) * next(self._uniform)
            start += machine.call * next(self._exponential)
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
        """Return the node of a server that gets all of a gradient, in turns."""
        # In fact, each gets a part. But links carry the same.
        server = next(self._servers)
        return (server + (server == node)) % self._setting.servers

    def _cross(self, start: float, source: int, target: int, took: float) -> float:
        """Send data between nodes; return when they are there."""
        # They enter one link while they leave the other.
        left = self._outward[source].carry(self._word, start, took)
        return max(left, self._inward[target].carry(self._word, start, took))

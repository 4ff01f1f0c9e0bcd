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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import admits
from hpcaccum.deadline import nap_after
from hpcaccum.plan.compute import Compute, Draws
from hpcaccum.plan.setting import Floats, Ints, Machine, Setting, napped
from hpcaccum.server import AT_A_TIME

# Updates that come before those that count, as a part of them.
_WARM_UP = 0.2
# Gradients of each rank at least, if each makes an update.
_LEAST_GRADIENTS = 50
# Gradients drawn at a time for all ranks, 8 MB; pushes of one rank; other numbers.
_GRADIENTS, _PUSHES, _NUMBERS = 1 << 20, 64, 4096
# Versions that a node remembers at least.
_VERSIONS = 1024
_step = _end = operator.itemgetter(1)


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

    def figures(self, samples: float, trains: float) -> dict[str, float]:
        """Return what is shown, of pushes of samples, and of a part of the time."""
        arrived = self.lags.total()
        accepted = arrived - self.dropped
        return {
            "updates_per_second": self.updates / self.seconds * trains,
            "samples_per_second": accepted * samples / self.seconds * trains,
            "dropped": self.dropped / arrived,
            "mean_lag": sum(lag * n for lag, n in self.lags.items()) / arrived,
            "waiting": float(self.waiting.mean()),
            "busiest_link": self.link / self.seconds * trains,
            "server_utilisation": self.server / self.seconds * trains,
            "available": trains,
            "law": self.law,
        }


def simulate(
    setting: Setting, machine: Machine, compute: Compute, updates: int, seed: int
) -> Outcome:
    """Simulate updates of a setting; the same ones for the same seed."""
    draws = Draws(compute, setting, seed)
    if not setting.has_server:
        return allreduce(setting, machine, draws, updates)
    kind: type[Rounds | Events] = Rounds
    updates *= setting.fragments
    if setting.quorum is None:
        kind, updates = Events, max(updates, _LEAST_GRADIENTS * setting.ranks)
    simulation = kind(setting, machine, draws)
    simulation.run(math.ceil(_WARM_UP * updates))
    return simulation.run(updates)


def allreduce(
    setting: Setting, machine: Machine, draws: Draws, updates: int
) -> Outcome:
    """Simulate updates for which all ranks wait for each other."""
    n, left = setting.node_of.size, updates
    found = Outcome(updates, np.zeros(n), Counter({0: n * updates}))
    while left:
        count = min(left, max(1, _GRADIENTS // n))
        took = draws.draw(np.arange(n), count)
        until = took + machine.call * draws.rng.standard_exponential(took.shape)
        found.computing += took.sum(axis=1)
        longest = until.max(axis=0)
        # The first that has waited notices last that all have arrived.
        late = napped(longest - until.min(axis=0), np.full(count, n / (n + 1)))
        found.seconds += float((longest + late).sum())
        left -= count
    found.seconds += updates * machine.reducing(setting)
    found.link = updates * setting.exchanged / machine.link
    return found


class Rounds:
    """Updates with the mean of a quorum of pushes, whose ranks wait for the last.

    Each fragment has a step and a quorum. A rank pushes one fragment after the other.
    """

    def __init__(self, setting: Setting, machine: Machine, draws: Draws) -> None:
        self._setting, self._machine, self._draws = setting, machine, draws
        self._node_of, self._crossing = setting.node_of, machine.crossing(setting)
        self._turn = machine.turns(setting, setting.nodes)
        n, fragments = self._node_of.size, setting.fragments
        self._everybody, self._quorum = np.arange(n), min(setting.quorum or 1, n)
        # The step of each fragment, and when it was published.
        self._step, self._published = np.zeros(fragments, int), np.zeros(fragments)
        # Until when parameters are sent.
        self._sent = 0.0
        # The next push of each rank: its fragment, when it arrives, and how long it was
        # computed; and the steps of all fragments that the rank has.
        fields = ("fragment", int), ("arrives", float), ("took", float)
        self._pushes = np.zeros(n, [*fields, ("local", int, (fragments,))])
        self._begin(self._everybody, np.zeros(n))

    def _begin(self, ranks: Ints, start: Floats) -> None:
        """Let ranks begin, at some times, what they push next."""
        setting, machine, draws = self._setting, self._machine, self._draws
        gaps = setting.gaps[self._pushes["fragment"][ranks]]
        counts = np.arange(setting.gaps.max()) < gaps[:, np.newaxis]
        took = draws.draw(ranks, counts.shape[1]).sum(axis=1, where=counts)
        until = took + machine.call * draws.rng.standard_gamma(gaps)
        until += start + machine.moved(setting, gaps)
        self._pushes["took"][ranks], self._pushes["arrives"][ranks] = took, until

    def _pull(self, ranks: Ints, start: Floats) -> None:
        """Let ranks pull the fragments that they have pushed, and go on."""
        fragment = self._pushes["fragment"][ranks]
        self._pushes["local"][ranks, fragment] = self._step[fragment]
        self._pushes["fragment"][ranks] = (fragment + 1) % self._step.size
        self._begin(ranks, start)

    def run(self, updates: int) -> Outcome:
        """Simulate as many updates more."""
        n = self._everybody.size
        self._found = found = Outcome(updates, np.zeros(n))
        begun = self._published.max()
        for _ in range(updates):
            self._round()
        found.seconds = self._published.max() - begun
        found.law = updates * (n - self._quorum) / found.lags.total()
        return found

    def _round(self) -> None:
        """Make the next update; drop the pushes that are stale before."""
        closes, chosen, stale = self._closing()
        while stale.size:
            dropped, lags = self._pushes[stale], self._lags[stale]
            begin = np.maximum(dropped["arrives"], self._published[dropped["fragment"]])
            away = self._crossing + 2 * self._machine.latency
            self._pull(stale, begin + away * (self._node_of[stale] > 0))
            closes, chosen, more = self._closing()
            # What they push next may close the update before the others are dropped.
            early = dropped["arrives"] < closes
            self._pushes[stale[~early]] = dropped[~early]
            self._count(stale[early], lags[early], dropped["took"][early])
            self._found.dropped += int(early.sum())
            stale = more
        self._count(chosen, self._lags[chosen], self._pushes["took"][chosen])
        self._close(closes, chosen)

    def _count(self, ranks: Ints, lags: Ints, took: Floats) -> None:
        """Count pushes of ranks, and the time they took."""
        self._found.lags.update(dict(enumerate(np.bincount(lags).tolist())))
        self._found.computing[ranks] += took

    def _closing(self) -> tuple[float, Ints, Ints]:
        """Return when a quorum is complete, its ranks, and those stale before."""
        fragments = self._pushes["fragment"]
        local = self._pushes["local"][self._everybody, fragments]
        fresh = admits(self._step[fragments], local, self._setting.staleness)
        self._lags = self._step[fragments] - local
        closes, chosen = math.inf, self._everybody
        turns = self._turn * np.arange(self._quorum)
        for fragment in range(self._step.size):
            ranks = self._everybody[fresh & (fragments == fragment)]
            if ranks.size >= self._quorum:
                arrives = self._pushes["arrives"][ranks]
                first = np.argpartition(arrives, self._quorum - 1)[: self._quorum]
                # They are admitted one after the other.
                last = (np.sort(arrives[first]) - turns).max() + turns[-1]
                if last < closes:
                    closes, chosen = last, ranks[first]
        closes += self._turn
        before = ~fresh & (self._pushes["arrives"] < closes)
        return closes, chosen, self._everybody[before]

    def _close(self, closes: float, waits: Ints) -> None:
        """Make the update, and let the ranks that wait for it begin."""
        machine, setting, uniform = self._machine, self._setting, self._draws.rng.random
        fragment = self._pushes["fragment"][waits[0]]
        # Late gradients alone may be a quorum, before the last update is made.
        before = self._published[fragment]
        closes = max(closes, before)
        notices = closes + float(napped(np.array([closes - before]), uniform(1))[0])
        # A server gets one sum of each node, or the rows of each rank, and sends what
        # has changed to all nodes at once.
        nodes = self._node_of[waits]
        away = nodes[nodes > 0]
        others = np.unique(away).size
        comes = (others if setting.touched == 1 else away.size) * self._crossing
        sends = others * self._crossing * setting.changed(waits.size) / setting.pushed
        late = machine.latency * (others > 0)
        took = comes + late + machine.updating(setting, waits.size - away.size + others)
        published = self._published[fragment] = notices + took
        self._step[fragment] += 1
        self._found.server += took / setting.fragments
        # All wait for what crosses the link, first in one direction, then in the other.
        self._found.link += comes + sends - max(0.0, min(comes, self._sent - notices))
        self._sent = published + sends
        # Each of several servers has a part that all nodes lack.
        far = (nodes > 0) | (setting.servers > 1)
        began = published + np.where(far, sends + late, 0.0)
        began += napped(published - self._pushes["arrives"][waits], uniform(waits.size))
        began += machine.call * self._draws.rng.standard_exponential(waits.size)
        began += waits.size / setting.nodes * machine.moved(setting)
        self._pull(waits, began)


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
        return bisect_right(self.all, (time, math.inf)) - 1

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


class Center:
    """A fragment of the parameters: its step, and when its last updates are made."""

    def __init__(self, ranks: int, nodes: int, ahead: int) -> None:
        self.step, self.made = 0, deque([0.0], ahead)
        # By rank: when it pulled, and its last arrival.
        self.starts, self.last = [0.0] * ranks, [0.0] * ranks
        self.versions = [Versions(self.starts) for _ in range(nodes)]


class Events:
    """Updates of one push each, if it is not more than ``staleness`` late."""

    def __init__(self, setting: Setting, machine: Machine, draws: Draws) -> None:
        self._setting, self._machine, self._draws = setting, machine, draws
        nodes, self._node_of = setting.nodes, setting.node_of.tolist()
        n = len(self._node_of)
        ahead = min(AT_A_TIME, setting.servers)
        self._centers = [Center(n, nodes, ahead) for _ in range(setting.fragments)]
        # The fragments that each rank pushes, and what it computes for them.
        self._fragments = [itertools.cycle(self._centers) for _ in range(n)]
        self._pushes = [self._pushes_of(np.array([rank])) for rank in range(n)]
        self._took = [0.0] * n
        self._uniform = self._random(draws.rng.random)
        self._exponential = self._random(draws.rng.standard_exponential)
        self._heap = [(self._begin(rank, 0.0), rank) for rank in range(n)]
        heapq.heapify(self._heap)
        # Until when the words of the steps are busy, and for how long each time.
        self._word, self._turn = 0.0, machine.turns(setting, setting.nodes)
        self._inward, self._outward = ([Link() for _ in range(nodes)] for _ in range(2))
        # The seconds in which a node sends a gradient to the servers of other nodes.
        servers, crossing = setting.servers, machine.crossing(setting)
        others = [servers - (node < servers) for node in range(nodes)]
        self._crossings = [each * crossing for each in others]
        self._servers = [itertools.cycle(range(servers)) for _ in range(2)]

    def _pushes_of(self, rank: Ints) -> Iterator[tuple[float, float]]:
        setting, machine, draws = self._setting, self._machine, self._draws
        gaps = np.tile(setting.gaps, -(-_PUSHES // setting.fragments))
        ends, moved = gaps.cumsum(), machine.moved(setting, gaps)
        while True:
            took = np.add.reduceat(draws.draw(rank, ends[-1])[0], ends - gaps)
            until = took + moved + machine.call * draws.rng.standard_gamma(gaps)
            yield from zip(took.tolist(), until.tolist(), strict=True)

    def _random(self, draw: Callable[[int], Any]) -> Iterator[float]:
        while True:
            yield from draw(_NUMBERS).tolist()

    def _begin(self, rank: int, start: float) -> float:
        """Begin what a rank pushes next; return when that arrives."""
        self._took[rank], until = next(self._pushes[rank])
        away = self._machine.latency if self._node_of[rank] else 0.0
        return start + until + away

    def run(self, updates: int) -> Outcome:
        """Simulate as many updates more."""
        self._found = found = Outcome(updates, np.zeros(len(self._node_of)))
        begun, self._since_pull, links = self._word, 0.0, self._inward + self._outward
        for link in links:
            link.carried = 0.0
        self._left = updates
        while self._left:
            self._arrive()
        found.seconds = self._word - begun
        found.link = max(link.carried for link in links)
        # The interval of an accepted gradient includes its own admission.
        computing = self._since_pull / found.seconds / len(self._centers)
        found.law = updates / found.lags.total() * (computing - 1)
        return found

    def _arrive(self) -> None:
        """Admit or drop the next push that arrives."""
        arrives, rank = self._heap[0]
        node, machine = self._node_of[rank], self._machine
        center = next(self._fragments[rank])
        pulled = center.versions[node].at(center.starts[rank])
        now = self._word = max(self._word, arrives) + self._turn
        # No update came between the newest version and a gradient that was dropped.
        self._since_pull += now - max(pulled.admitted, center.last[rank])
        center.last[rank] = now
        self._found.computing[rank] += self._took[rank]
        self._found.lags[center.step - pulled.step] += 1
        if admits(center.step, pulled.step, self._setting.staleness):
            center.step += 1
            self._left -= 1
            start = self._update(now, node, center)
            start += nap_after(start - now) * next(self._uniform)
            start += machine.call * next(self._exponential)
        else:
            self._found.dropped += 1
            start = self._useful(now, node, center)
        center.starts[rank] = start = start + machine.moved(self._setting)
        heapq.heapreplace(self._heap, (self._begin(rank, start), rank))

    def _update(self, now: float, node: int, center: Center) -> float:
        """Make an update of a gradient; return when its node has the parameters."""
        free, busy = center.made[0], center.made[-1]
        # One server asks for the next gradient after an update, several ask earlier.
        away = self._machine.latency if self._crossings[node] else 0.0
        arrived = self._cross(max(now, free) + away, node)
        if arrived > busy:
            arrived += nap_after(arrived - busy) * next(self._uniform)
        end = max(busy, arrived) + self._machine.updating(self._setting, 1)
        self._found.server += (end - max(busy, now)) / self._setting.fragments
        center.made.append(end)
        made = Version(end, center.step, now)
        center.versions[0].add(made)
        return self._pull(made, node, center)

    def _useful(self, now: float, node: int, center: Center) -> float:
        """Return when a rank whose gradient was dropped has parameters of use."""
        needed = center.step - int(self._setting.staleness)
        for known in center.versions[node].since(needed):
            return max(now, known.time)
        served = center.versions[0]
        (made,) = served.since(needed)
        asked = max(now + self._machine.latency, made.time)
        return self._pull(served.at(asked)._replace(time=asked), node, center)

    def _pull(self, made: Version, node: int, center: Center) -> float:
        """Send a version to a node; return when it is there."""
        had = center.versions[node].all[-1]
        there = self._cross(made.time, node, made.step - had.step)
        if node:
            there = max(there, had.time)
            center.versions[node].add(made._replace(time=there))
        return there

    def _cross(self, start: float, node: int, back: int = 0) -> float:
        """Send a push, or ``back`` what so many updates changed; return its arrival."""
        if not (took := self._crossings[node]):
            return start
        if back and self._setting.touched < 1:
            took *= self._setting.changed(back) / self._setting.pushed
        # In fact, each server gets a part; links carry the same.
        server = next(self._servers[back > 0])
        server = (server + (server == node)) % self._setting.servers
        source, target = (server, node) if back else (node, server)
        # They enter one link while they leave the other.
        left = self._outward[source].carry(self._word, start, took)
        entered = self._inward[target].carry(self._word, start, took)
        return max(left, entered) + self._machine.latency

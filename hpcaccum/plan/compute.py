"""The time of one gradient, as text: a distribution, then what changes it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcaccum import option_values as values
from hpcaccum.errors import InvalidArgumentError, counted
from hpcaccum.plan.setting import Floats, Ints, Setting

_SHARE = re.compile(f"{values.NUMBER}% x{values.NUMBER}(?:-{values.NUMBER})?")
_NAMED = re.compile(r"(rank|node)s? ([0-9,-]+) (?:([x+]) ?(\S+)|lost)")
_FAILURES = re.compile(rf"failures {values.NUMBER}/h restart (\S+)")
MORE = (
    "'6% x3' or '6% x2-10' (that share of gradients takes so many times as long), "
    "'rank 7 +45ms', 'rank 7 x1.5', 'node 2,4-7 x1.5', 'node 2 lost' (for good), or "
    "'failures 0.01/h restart 5m'"
)


class Change(NamedTuple):
    """Makes a share of gradients slower, or all of some ranks or nodes: x + delay."""

    share: float = 1.0
    kind: str = ""
    numbers: tuple[int, ...] = ()
    factors: tuple[float, float] = (1.0, 1.0)
    delay: float = 0.0
    lost: bool = False

    def named(self, ranks: Ints, node_of: Ints) -> Any:
        """Return which of some ranks it names."""
        return np.isin(node_of if self.kind == "node" else ranks, self.numbers)


@dataclass(frozen=True)
class Compute:
    """What ``--compute`` says; failures of a node in a second, seconds to restart.

    The distribution is that of all ranks, or has what some of them have measured.
    """

    text: str
    distribution: values.Distribution | values.Times
    changes: tuple[Change, ...] = ()
    failures: float = 0.0
    restart: float = 0.0

    def lost(self, ranks: int, nodes: int) -> tuple[int, ...]:
        """Return the ranks that are lost.

        Raise InvalidArgumentError if it names one that does not exist, or loses rank 0.
        """
        everybody, gone = np.arange(ranks), np.zeros(ranks, bool)
        node_of = everybody * nodes // ranks
        for change in self.changes:
            kind, last = change.kind, (nodes if change.kind == "node" else ranks) - 1
            if kind and max(change.numbers) > last:
                job = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"
                raise InvalidArgumentError(
                    f"--compute: {kind} {max(change.numbers)} does not exist; the last "
                    f"of {job} is {kind} {last}"
                )
            gone |= change.named(everybody, node_of) & change.lost
        # The others of a node are lost with its first rank.
        first = np.diff(node_of, prepend=-1) > 0
        gone |= np.isin(node_of, node_of[gone & first]) & (nodes > 1)
        if gone[0]:
            raise InvalidArgumentError(
                "--compute: rank 0 cannot be lost, as a job ends without it"
            )
        return tuple(np.flatnonzero(gone).tolist())

    def availability(self, nodes: int) -> float:
        """Return the share of time in which no restart is under way."""
        return 1 / (1 + self.failures * nodes * self.restart)


def compute(text: str) -> Compute:
    """Return what a text of ``--compute`` says, or raise ArgumentTypeError."""
    first, *more = (" ".join(term.split()) for term in text.split(";"))
    changes, failures = list[Change](), (0.0, 0.0)
    distribution = values.distribution(first, "the first term")
    for place, term in enumerate(more, 2):
        what = f"term {place}, {term!r},"
        if not (found := _FAILURES.fullmatch(term)):
            changes.append(_change(term, what))
            continue
        if any(failures):
            raise argparse.ArgumentTypeError(f"{what} is the second of failures")
        hourly = values.factor(found[1], f"{what} its failures")
        failures = hourly / 3600, values.duration(found[2], f"{what} its restart")
    return Compute(text, distribution, tuple(changes), *failures)


def _change(term: str, what: str) -> Change:
    if found := _SHARE.fullmatch(term):
        share, *factors = (each or found[2] for each in found.groups())
        low, high = (values.factor(each, f"{what} its factor") for each in factors)
        if float(share) <= 100 and low <= high:
            return Change(float(share) / 100, factors=(low, high))
    elif found := _NAMED.fullmatch(term):
        kind, given, sign, size = found.groups()
        change = Change(1.0, kind, values.numbers(given, what))
        if sign is None:
            return change._replace(lost=True)
        if sign == "+":
            return change._replace(delay=values.duration(size, f"{what} its delay"))
        return change._replace(factors=(values.factor(size, f"{what} its factor"),) * 2)
    raise argparse.ArgumentTypeError(f"{what} must be {MORE}")


class Draws:
    """Draws times of gradients, and other numbers, the same ones for the same seed."""

    def __init__(self, compute: Compute, setting: Setting, seed: int) -> None:
        self.rng, self._distribution = np.random.default_rng(seed), compute.distribution
        ranks, node_of = setting.present, setting.node_of
        self._changes = [(each, each.named(ranks, node_of)) for each in compute.changes]
        if isinstance(self._distribution, list):
            # Read in order, from a random place on: slow phases last as they did.
            length = max(map(len, self._distribution))
            rows = [np.resize(each, length) for each in self._distribution]
            self._series, count = np.array(rows), len(rows)
            self._whose = (ranks % count)[:, np.newaxis]
            self._at = self.rng.integers(0, length, (len(ranks), 1))

    def draw(self, ranks: Ints, count: int = 1) -> Floats:
        """Return the times of the next gradients of different ranks, a row for each."""
        rng, shape, times = self.rng, (len(ranks), count), np.empty(0)
        if isinstance(self._distribution, list):
            places = (self._at[ranks] + np.arange(count)) % self._series.shape[1]
            times = self._series[self._whose[ranks], places]
            self._at[ranks] += count
        else:
            times = self._distribution(rng, shape)
        for (share, kind, _, (low, high), delay, _), named in self._changes:
            slow = named[ranks, np.newaxis] if kind else rng.random(shape) < share
            factor = low if low == high else rng.uniform(low, high, shape)
            times = np.where(slow, times * factor + delay, times)
        return times

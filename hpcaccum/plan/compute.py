"""The time of one gradient, as text: a distribution, then what changes it."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import read_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"
_TIME = re.compile(f"{_NUMBER} ?({'|'.join(_SECONDS)})")
_SHARE = re.compile(f"{_NUMBER}% x{_NUMBER}(?:-{_NUMBER})?")
_PLACED = re.compile(r"(rank|node)s? ([0-9,-]+) ([x+]) ?(\S+)")
_FAILURES = re.compile(rf"failures {_NUMBER}/h restart (\S+)")
_FIRST = (
    "a time such as 30ms, 'normal MEAN DEVIATION', 'lognormal MEAN SIGMA', "
    "'exponential MEAN', or a file of times"
)
_MORE = (
    "'6% x3' or '6% x2-10' (that share of gradients takes so many times as long), "
    "'rank 7 +45ms', 'rank 7 x1.5', 'node 2,4-7 x1.5', or 'failures 0.01/h restart 5m'"
)
# What each distribution has after its name.
_WANTS = {
    "constant": ("MEAN",),
    "normal": ("MEAN", "DEVIATION"),
    "lognormal": ("MEAN", "SIGMA"),
    "exponential": ("MEAN",),
}


def seconds(text: str, what: str) -> float:
    """Return the seconds of a time such as 30ms, or raise ArgumentTypeError."""
    found = _TIME.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{what} must be a time such as 30ms, 1.5s or 200us, got {text!r}"
        )
    return float(found[1]) * _SECONDS[found[2]]


def number(text: str, what: str) -> float:
    """Return a number of at least 0, or raise ArgumentTypeError."""
    if not re.fullmatch(_NUMBER, text):
        raise argparse.ArgumentTypeError(
            f"{what} must be a number such as 0.3, got {text!r}"
        )
    return float(text)


class Distribution(NamedTuple):
    """The distribution of the time of a gradient, before it is changed.

    Attributes:
        name: A key of ``_WANTS``, or "file".
        mean: In seconds.
        width: The deviation of a normal distribution, in seconds; sigma of a lognormal
            one, the deviation of the logarithm.
        series: Of a file: what each rank measured, one gradient after the other.
    """

    name: str
    mean: float
    width: float = 0.0
    series: tuple[tuple[float, ...], ...] = ()


class Change(NamedTuple):
    """What makes some gradients slower: ``time * factor + delay``.

    Attributes:
        share: Of the gradients that it changes, drawn at random.
        kind: "rank" or "node" if it changes those of some; empty for all.
        numbers: Of these ranks or nodes.
        factors: The factor is drawn between these two.
        delay: In seconds.
    """

    share: float = 1.0
    kind: str = ""
    numbers: tuple[int, ...] = ()
    factors: tuple[float, float] = (1.0, 1.0)
    delay: float = 0.0


@dataclass(frozen=True)
class Compute:
    """What ``--compute`` says.

    Attributes:
        text: As it was typed.
        distribution: Of the time of a gradient.
        changes: Applied to it in order.
        failures: Of a node, in each second.
        restart: Seconds from a failure until all ranks train again.
    """

    text: str
    distribution: Distribution
    changes: tuple[Change, ...] = ()
    failures: float = 0.0
    restart: float = 0.0

    def check(self, ranks: int, nodes: int) -> None:
        """Raise InvalidArgumentError if it names a rank or node that does not exist."""
        for change in self.changes:
            size = nodes if change.kind == "node" else ranks
            if change.kind and max(change.numbers) >= size:
                raise InvalidArgumentError(
                    f"--compute: {change.kind} {max(change.numbers)} does not exist: "
                    f"of {ranks} ranks on {nodes} nodes, the last is {change.kind} "
                    f"{size - 1}"
                )

    def availability(self, nodes: int) -> float:
        """Return the share of time in which no restart is under way."""
        return 1 / (1 + self.failures * nodes * self.restart)


def compute(text: str) -> Compute:
    """Return what a text of ``--compute`` says, or raise ArgumentTypeError."""
    first, *more = (" ".join(term.split()) for term in text.split(";"))
    changes, failures = list[Change](), (0.0, 0.0)
    distribution = _distribution(first)
    for place, term in enumerate(more, 2):
        what = f"term {place}, {term!r},"
        if found := _FAILURES.fullmatch(term):
            failures = float(found[1]) / 3600, seconds(found[2], f"{what} its restart")
        else:
            changes.append(_change(term, what))
    return Compute(text, distribution, tuple(changes), *failures)


def _distribution(text: str) -> Distribution:
    name, *given = text.split() or [""]
    if _TIME.fullmatch(text):
        name, given = "constant", [text]
    if name not in _WANTS:
        return _file(text)
    if len(given) != len(_WANTS[name]):
        wants = " and ".join(_WANTS[name])
        raise argparse.ArgumentTypeError(f"{name!r} needs {wants}, got {text!r}")
    mean, width = seconds(given[0], f"MEAN of {name!r}"), 0.0
    if name == "normal":
        width = seconds(given[1], "DEVIATION of 'normal'")
    if name == "lognormal":
        width = number(given[1], "SIGMA of 'lognormal', that of the logarithm,")
    return Distribution(name, mean, width)


def _change(term: str, what: str) -> Change:
    if found := _SHARE.fullmatch(term):
        share, low, high = (float(each or found[2]) for each in found.groups())
        if share <= 100:
            return Change(share / 100, factors=(low, high))
    elif found := _PLACED.fullmatch(term):
        kind, numbers, sign, size = found.groups()
        chosen = _numbers(numbers, what)
        if sign == "+":
            return Change(1.0, kind, chosen, delay=seconds(size, f"{what} its delay"))
        factor = number(size, f"{what} its factor")
        return Change(1.0, kind, chosen, (factor, factor))
    raise argparse.ArgumentTypeError(f"{what} must be {_MORE}")


def _numbers(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers of a text such as 3 or 0,4-7."""
    found = list[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise argparse.ArgumentTypeError(
                f"{what} must name numbers such as 7, 3,7 or 4-7, got {text!r}"
            )
        found += range(int(first), int(last) + 1)
    return tuple(found)


# Files


def _file(text: str) -> Distribution:
    path = Path(text)
    if not text or not path.is_file():
        message = f"the first term must be {_FIRST}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    try:
        lines = read_lines(path)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    try:
        series = _traced(json.loads("\n".join(lines)))
    except (ValueError, TypeError, LookupError):
        series = [_listed(path, lines)]
    times = [each for one in series for each in one]
    if not times:
        raise argparse.ArgumentTypeError(f"{path} has no time of a gradient")
    mean = sum(times) / len(times)
    return Distribution("file", mean, series=tuple(map(tuple, series)))


def _traced(trace: Any) -> list[list[float]]:
    """Return the times of gradients in a file of ``train --trace``, by rank."""
    found: dict[tuple[int, int], list[float]] = {}
    for event in trace["traceEvents"]:
        if event["name"] == "compute":
            place = event["pid"], event["tid"]
            found.setdefault(place, []).append(event["dur"] * 1e-6)
    return [found[place] for place in sorted(found)]


def _listed(path: Path, lines: Sequence[str]) -> list[float]:
    """Return the times in a text: seconds, or with units."""
    found = list[float]()
    for place, line in enumerate(lines, 1):
        for word in re.sub(r"[\[\],;]", " ", line.partition("#")[0]).split():
            if not re.fullmatch(f"{_NUMBER}|{_TIME.pattern}", word):
                raise argparse.ArgumentTypeError(
                    f"{path}: line {place} must have times such as 0.03 (seconds) or "
                    f"30ms, got {word!r}"
                )
            found.append(seconds(word if word[-1] in "smh" else f"{word}s", "time"))
    return found


# Draws


class Draws:
    """Draws times of gradients, the same ones for the same seed.

    The times of a file are read in order, from a random place on, so that slow phases
    last as long as they did.

    Args:
        compute: What is drawn.
        node_of: The node of each rank.
        rng: The source of random numbers.
    """

    def __init__(
        self, compute: Compute, node_of: Ints, rng: np.random.Generator
    ) -> None:
        self._rng, self._distribution = rng, compute.distribution
        ranks = np.arange(len(node_of))
        self._changes = [
            (each, np.isin(node_of if each.kind == "node" else ranks, each.numbers))
            for each in compute.changes
        ]
        if series := compute.distribution.series:
            self._lengths = np.array([len(each) for each in series])
            self._begins = np.concatenate([[0], np.cumsum(self._lengths)[:-1]])
            self._series = np.concatenate([np.array(each) for each in series])
            self._whose = ranks % len(series)
            self._at = rng.integers(0, self._lengths[self._whose])

    def draw(self, ranks: Ints, count: int = 1) -> Floats:
        """Return the times of the next gradients of different ranks, a row for each."""
        shape = len(ranks), count
        times = self._plain(ranks, shape)
        for change, concerned in self._changes:
            slow = concerned[ranks, np.newaxis] if change.kind else np.True_
            if change.share < 1:
                slow = slow & (self._rng.random(shape) < change.share)
            low, high = change.factors
            factor = low if low == high else self._rng.uniform(low, high, shape)
            times = np.where(slow, times * factor + change.delay, times)
        return times

    def _plain(self, ranks: Ints, shape: tuple[int, int]) -> Floats:
        name, mean, width, series = self._distribution
        if series:
            whose = self._whose[ranks]
            places = self._at[ranks, np.newaxis] + np.arange(shape[1])
            places %= self._lengths[whose, np.newaxis]
            self._at[ranks] += shape[1]
            found: Floats = self._series[self._begins[whose, np.newaxis] + places]
            return found
        if name == "normal":
            return np.maximum(self._rng.normal(mean, width, shape), 0)
        if name == "lognormal":
            # The mean of a lognormal distribution is exp(mu + sigma ** 2 / 2).
            mu = math.log(mean or 1e-300) - width**2 / 2
            return self._rng.lognormal(mu, width, shape)
        if name == "exponential":
            return self._rng.exponential(mean, shape)
        return np.full(shape, mean)

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
from hpcaccum.option_values import A_DURATION, DURATIONS, NUMBER, duration, quantity

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Distribution = Callable[[np.random.Generator, tuple[int, int]], Floats]
    # What each rank measured, one gradient after the other.
    Series = list[list[float]]

_SHARE = re.compile(f"{NUMBER}% x{NUMBER}(?:-{NUMBER})?")
_NAMED = re.compile(r"(rank|node)s? ([0-9,-]+) ([x+]) ?(\S+)")
_FAILURES = re.compile(rf"failures {NUMBER}/h restart (\S+)")
_WANTS = {"normal": "MEAN DEVIATION", "lognormal": "MEAN SIGMA", "exponential": "MEAN"}
FIRST = (
    "a time such as 30ms, 'normal MEAN DEVIATION', 'lognormal MEAN SIGMA', "
    "'exponential MEAN', or a file of times or of train --trace"
)
MORE = (
    "'6% x3' or '6% x2-10' (that share of gradients takes so many times as long), "
    "'rank 7 +45ms', 'rank 7 x1.5', 'node 2,4-7 x1.5', or 'failures 0.01/h restart 5m'"
)


def _number(text: str, what: str) -> float:
    return quantity(text, {"": 1.0}, f"{what} must be a number such as 0.3")


class Change(NamedTuple):
    """Makes a share of gradients slower, or all of some ranks or nodes: x + delay."""

    share: float = 1.0
    kind: str = ""
    numbers: tuple[int, ...] = ()
    factors: tuple[float, float] = (1.0, 1.0)
    delay: float = 0.0


@dataclass(frozen=True)
class Compute:
    """What ``--compute`` says; failures of a node in a second, seconds to restart."""

    text: str
    distribution: Distribution | Series
    changes: tuple[Change, ...] = ()
    failures: float = 0.0
    restart: float = 0.0

    def check(self, ranks: int, nodes: int) -> None:
        """Raise InvalidArgumentError if it names a rank or node that does not exist."""
        for _, kind, numbers, *_ in self.changes:
            size = nodes if kind == "node" else ranks
            if kind and max(numbers) >= size:
                raise InvalidArgumentError(
                    f"--compute: {kind} {max(numbers)} does not exist; the last of "
                    f"{ranks} ranks on {nodes} nodes is {kind} {size - 1}"
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
            failures = float(found[1]) / 3600, duration(found[2], f"{what} its restart")
        else:
            changes.append(_change(term, what))
    return Compute(text, distribution, tuple(changes), *failures)


def _distribution(text: str) -> Distribution | Series:
    name, *given = text.split() or [""]
    if name not in _WANTS:
        if Path(text).is_file():
            return _file(Path(text))
        mean = quantity(text, DURATIONS, f"the first term must be {FIRST}")
        return lambda rng, shape: np.full(shape, mean)
    if len(given) != len(_WANTS[name].split()):
        raise argparse.ArgumentTypeError(f"{name} needs {_WANTS[name]}, got {text!r}")
    mean = duration(given[0], f"MEAN of {name}")
    if name == "exponential":
        return lambda rng, shape: rng.exponential(mean, shape)
    if name == "normal":
        width = duration(given[1], "DEVIATION of normal")
        return lambda rng, shape: np.maximum(rng.normal(mean, width, shape), 0)
    sigma = _number(given[1], "SIGMA of lognormal, the deviation of the logarithm,")
    # Its mean is exp(mu + sigma ** 2 / 2).
    mu = math.log(max(mean, 1e-300)) - sigma**2 / 2
    return lambda rng, shape: rng.lognormal(mu, sigma, shape)


def _change(term: str, what: str) -> Change:
    if found := _SHARE.fullmatch(term):
        share, low, high = (float(each or found[2]) for each in found.groups())
        if share <= 100:
            return Change(share / 100, factors=(low, high))
    elif found := _NAMED.fullmatch(term):
        kind, numbers, sign, size = found.groups()
        chosen = _numbers(numbers, what)
        if sign == "+":
            return Change(1.0, kind, chosen, delay=duration(size, f"{what} its delay"))
        factor = _number(size, f"{what} its factor")
        return Change(1.0, kind, chosen, (factor, factor))
    raise argparse.ArgumentTypeError(f"{what} must be {MORE}")


def _numbers(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers of a text such as 3 or 0,4-7."""
    found = list[int]()
    for part in text.split(","):
        ends = re.fullmatch("([0-9]+)(?:-([0-9]+))?", part)
        if not ends:
            raise argparse.ArgumentTypeError(
                f"{what} must name numbers such as 7, 3,7 or 4-7, got {text!r}"
            )
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return tuple(found)


def _file(path: Path) -> Series:
    """Return the times in a file of ``train --trace``, by rank, or in a list."""
    try:
        lines = read_lines(path)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    found: dict[Any, list[float]] = {}
    try:
        for event in json.loads("\n".join(lines))["traceEvents"]:
            if event["name"] == "compute":
                rank = event["pid"], event["tid"]
                found.setdefault(rank, []).append(event["dur"] * 1e-6)
    except (ValueError, TypeError, LookupError):
        units, listed = {"": 1.0, **DURATIONS}, list[float]()
        for place, line in enumerate(lines, 1):
            wanted = f"{path}, line {place}: each {A_DURATION}"
            words = re.sub(r"[\[\],;]", " ", line.partition("#")[0]).split()
            listed += [quantity(word, units, wanted) for word in words]
        found = {0: listed}
    if not any(found.values()):
        raise argparse.ArgumentTypeError(f"{path} has no time of a gradient")
    return [found[rank] for rank in sorted(found)]


class Draws:
    """Draws times of gradients, and other numbers, the same ones for the same seed."""

    def __init__(self, compute: Compute, node_of: Ints, seed: int) -> None:
        self.rng, self._distribution = np.random.default_rng(seed), compute.distribution
        ranks = np.arange(len(node_of))
        self._changes = [
            (each, np.isin(node_of if each.kind == "node" else ranks, each.numbers))
            for each in compute.changes
        ]
        if isinstance(self._distribution, list):
            # Read in order, from a random place on: slow phases last as they did. All
            # series in one vector: where that of each rank begins, and its length.
            self._series = np.concatenate(self._distribution)
            lengths = np.array([len(each) for each in self._distribution])
            whose = (ranks % len(lengths))[:, np.newaxis]
            self._begins = (np.cumsum(lengths) - lengths)[whose]
            self._lengths = lengths[whose]
            self._at = self.rng.integers(0, self._lengths)

    def draw(self, ranks: Ints, count: int = 1) -> Floats:
        """Return the times of the next gradients of different ranks, a row for each."""
        rng, shape, times = self.rng, (len(ranks), count), np.empty(0)
        if isinstance(self._distribution, list):
            places = (self._at[ranks] + np.arange(count)) % self._lengths[ranks]
            times = self._series[self._begins[ranks] + places]
            self._at[ranks] += count
        else:
            times = self._distribution(rng, shape)
        for (share, kind, _, (low, high), delay), named in self._changes:
            slow = named[ranks, np.newaxis] if kind else rng.random(shape) < share
            factor = low if low == high else rng.uniform(low, high, shape)
            times = np.where(slow, times * factor + delay, times)
        return times

    def pushes(
        self, ranks: Ints, count: int, steps: int, call: float
    ) -> tuple[Floats, Floats]:
        """Return what ranks compute for pushes of some steps; and with their calls."""
        shape = len(ranks), count
        took = self.draw(ranks, count * steps).reshape(*shape, steps).sum(axis=2)
        return took, took + call * self.rng.standard_gamma(steps, shape)

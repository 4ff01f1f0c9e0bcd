"""The options of commands, and their values as they are typed.

Each function but `add` and `add_flag` returns the value of a text, or raises
ArgumentTypeError.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpcaccum.arguments import seconds
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import json_value, read_lines

# Times in seconds, in a list for each rank; and what draws so many times.
Times = list[list[float]]
Distribution = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]

# "auto", or ranks.
Servers = str | tuple[int, ...]

# A number of a quantity, as a regular expression.
NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"

DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
A_DURATION = "must be a time such as 30ms, 1.5s or 200us"

# Prefixes of bytes a second, and of parameters.
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

# Distributions of times, and what each needs. With a larger deviation of the logarithm,
# one time would be longer than all others together.
_PARAMETERS = {
    "normal": "MEAN DEVIATION",
    "lognormal": "MEAN SIGMA",
    "exponential": "MEAN",
}
A_DISTRIBUTION = (
    "a time such as 30ms, 'normal MEAN DEVIATION', 'lognormal MEAN SIGMA', "
    "'exponential MEAN', or a file of times, or of train --log or --trace"
)

PICTURES = (".png", ".svg", ".pdf")

# An hour, in milliseconds.
_LONGEST_DELAY = 3_600_000


class Every(NamedTuple):
    """How often something is done: after so many updates, or so much time; one is 0."""

    updates: int = 0
    seconds: float = 0.0


def add(
    parser: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], Any],
    text: str,
    default: Any = None,
    metavar: str | None = "N",
) -> None:
    """Add an option with a value to a parser, or to a group of it."""
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def add_flag(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def count(text: str) -> int:
    """Return an integer of at least 1."""
    return int(number(text, int, 1))


def whole(text: str) -> int:
    """Return an integer of at least 0."""
    return int(number(text, int, 0))


def servers(text: str) -> Servers:
    """Return "auto", or ranks such as 0,8,16."""
    return text if text == "auto" else tuple(map(whole, text.split(",")))


def positive(text: str) -> float:
    """Return a finite number above 0."""
    found = number(text, float, 0)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text!r}")
    return found


def fraction(text: str) -> float:
    """Return a finite number above -1."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not -1 < found < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a fraction such as 0.1, got {text!r}"
        )
    return found


def several(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return what reads several values, which commas separate."""
    return lambda text: [kind(each) for each in text.split(",")]


def picture(text: str) -> Path:
    """Return the name of a file for a picture."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"must end in one of {' '.join(PICTURES)}, got {text!r}"
        )
    return path


def number(text: str, kind: type[int | float], least: int) -> float:
    """Return a number of at least ``least``, or raise ArgumentTypeError."""
    try:
        found: float = kind(text)
    except ValueError:
        found = math.nan
    if not found >= least:
        name = "an integer" if kind is int else "a number"
        message = f"must be {name} of at least {least}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return found


def every(text: str) -> Every:
    """Return a number of updates, or a time."""
    if text.isdecimal():
        return Every(updates=count(text))
    try:
        return Every(seconds=time(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; or a number of updates, such as 100"
        ) from None


def time(text: str) -> float:
    """Return the seconds of a time such as 90s, 5m or 1h."""
    try:
        return seconds(text, "it")
    except InvalidArgumentError:
        raise argparse.ArgumentTypeError(
            f"must look like 90s, 5m or 1h, got {text!r}"
        ) from None


def counts(text: str) -> list[int]:
    """Return the numbers of a text such as 4,6 or 4:64, which doubles them."""
    found = list[int]()
    for part in text.split(","):
        first, colon, last = part.partition(":")
        each = count(first)
        end = count(last) if colon else each
        if end < each:
            raise argparse.ArgumentTypeError(
                f"must be numbers such as 4,6 or a range such as 4:64, got {text!r}"
            )
        while each <= end:
            found.append(each)
            each *= 2
    return list(dict.fromkeys(found))


def quantity(text: str, units: Mapping[str, float], wanted: str) -> float:
    """Return a finite number above 0 with a unit; ``wanted`` begins the message."""
    found = re.fullmatch(f"{NUMBER} ?({'|'.join(units)})", text)
    value = float(found[1]) * units[found[2]] if found else 0.0
    if not 0 < value < math.inf:
        more = ", finite and above 0" if found else ""
        raise argparse.ArgumentTypeError(f"{wanted}{more}, got {text!r}")
    return value


def duration(text: str, what: str) -> float:
    """Return the seconds of a time such as 30ms; ``what`` begins the message."""
    return quantity(text, DURATIONS, f"{what} {A_DURATION}")


def levels(text: str, wanted: str) -> list[tuple[float, float]]:
    """Return the latency and the rate of one or two levels: 1us 25GB/s; 2us 12GB/s."""
    found = [each.split(maxsplit=1) for each in text.split(";")]
    if len(found) > 2 or any(len(each) < 2 for each in found):
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
    units = {f"{unit}B/s": power for unit, power in _POWERS.items()}
    a_rate = "a rate must be one such as 25GB/s"
    return [(duration(a, "a latency"), quantity(b, units, a_rate)) for a, b in found]


def distribution(text: str, what: str) -> Distribution | Times:
    """Return what draws times, or the times of a file; ``what`` begins the message."""
    name, *given = text.split() or [""]
    if name not in _PARAMETERS:
        if (path := Path(text)).is_file():
            return _times(path)
        mean = quantity(text, DURATIONS, f"{what} must be {A_DISTRIBUTION}")
        return lambda rng, shape: rng.uniform(mean, mean, shape)
    if len(given) != len(_PARAMETERS[name].split()):
        message = f"{name} needs {_PARAMETERS[name]}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    mean = duration(given[0], f"MEAN of {name}")
    if name == "exponential":
        return lambda rng, shape: rng.exponential(mean, shape)
    if name == "normal":
        width = duration(given[1], "DEVIATION of normal")
        return lambda rng, shape: rng.normal(mean, width, shape).clip(0)
    sigma = factor(given[1], "SIGMA of lognormal, the deviation of the logarithm,")
    # Its mean is exp(mu + sigma ** 2 / 2).
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, shape: rng.lognormal(mu, sigma, shape)


def _times(path: Path) -> Times:
    """Return the times in a file of ``train``, by rank, or in a list."""
    lines = _read(path)
    found: dict[Any, list[float]] = {}
    try:
        for rank, time in _of_train(lines):
            found.setdefault(rank, []).append(time)
    except (ValueError, TypeError, LookupError):
        units, found = {"": 1.0, **DURATIONS}, {0: []}
        for place, line in enumerate(lines, 1):
            wanted = f"{path}, line {place}: each {A_DURATION}"
            words = re.sub(r"[\[\],;]", " ", line.partition("#")[0]).split()
            found[0] += [quantity(word, units, wanted) for word in words]
    times = [found[rank] for rank in sorted(found)]
    if not any(times) or not all(0 <= each < math.inf for row in times for each in row):
        message = f"{path} has no times of gradients, or some that are not finite"
        raise argparse.ArgumentTypeError(message)
    return times


def _of_train(lines: list[str]) -> Iterator[tuple[Any, float]]:
    """Yield ranks and times from a log or a trace, or raise an error."""
    if lines[0].startswith('{"event"'):
        for result in map(json_value, lines):
            for rank, times in enumerate(result.get("gradient_seconds", ())):
                yield from ((rank, float(time)) for time in times)
        return
    for event in json_value("\n".join(lines))["traceEvents"]:
        if event["name"] == "compute":
            yield (event["pid"], event["tid"]), event["dur"] * 1e-6


def _read(path: Path) -> list[str]:
    try:
        return read_lines(path)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers_of(
    path: Path, name: str, least: Mapping[str, float], **usual: float
) -> dict[str, Any]:
    """Return numbers of an object in a file's first line; not all need be there."""
    try:
        found = {**usual, **json_value(_read(path)[0])[name]}
    except (ValueError, TypeError, LookupError):
        raise argparse.ArgumentTypeError(f"{path} has no line with {name!r}") from None
    for each, low in least.items():
        value = found.get(each)
        if not isinstance(value, int | float) or not low <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{path}: {each} must be a number of at least {low:g}, got {value!r}"
            )
    return {each: found[each] for each in least}


def factor(text: str, what: str) -> float:
    """Return a number such as 0.3; ``what`` begins the message."""
    return quantity(text, {"": 1.0}, f"{what} must be a number such as 0.3")


def share(text: str) -> float:
    """Return the number of a text such as 2% or 0.02, at most 1."""
    wanted = "must be a share such as 2% or 0.02"
    if (found := quantity(text, {"%": 0.01, "": 1.0}, wanted)) <= 1:
        return found
    raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")


def parameters(text: str) -> int:
    """Return the number of a text such as 25M."""
    wanted = "must be a number such as 25M, 1.5G or 1000"
    if found := round(quantity(text, {**_POWERS, "B": 1e9}, wanted)):
        return found
    raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers of a text such as 3 or 0,4-7; ``what`` begins the message."""
    found = list[int]()
    for part in text.split(","):
        ends = re.fullmatch("([0-9]{1,7})(?:-([0-9]{1,7}))?", part)
        if not ends or int(ends[1]) > (last := int(ends[2] or ends[1])):
            raise argparse.ArgumentTypeError(
                f"{what} must name numbers such as 7, 3,7 or 4-7, got {text!r}"
            )
        found += range(int(ends[1]), last + 1)
    return tuple(found)


def straggler(text: str) -> tuple[int, float]:
    """Return a rank and its delay in milliseconds."""
    rank, colon, delay = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"must be RANK:MILLISECONDS, got {text!r}")
    milliseconds = number(delay, float, 0)
    if milliseconds > _LONGEST_DELAY:
        raise argparse.ArgumentTypeError(
            f"must be at most {_LONGEST_DELAY} milliseconds, got {delay!r}"
        )
    return whole(rank), milliseconds

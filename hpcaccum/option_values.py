"""The options of commands, and their values as they are typed.

Each function but `add` and `add_flag` returns the value of a text, or raises
ArgumentTypeError.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.arguments import seconds
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# "auto", or ranks.
Servers = str | tuple[int, ...]

# A number of a quantity, as a regular expression.
NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"

# The units of a duration, in seconds, and how one looks.
DURATIONS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
A_DURATION = "must be a time such as 30ms, 1.5s or 200us"

# Formats of pictures.
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
    """Return a number with one of the units; ``wanted`` begins the message."""
    if found := re.fullmatch(f"{NUMBER} ?({'|'.join(units)})", text):
        return float(found[1]) * units[found[2]]
    raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")


def duration(text: str, what: str) -> float:
    """Return the seconds of a time such as 30ms; ``what`` begins the message."""
    return quantity(text, DURATIONS, f"{what} {A_DURATION}")


def widths(text: str) -> tuple[int, ...]:
    """Return the widths of layers, which commas separate."""
    return tuple(count(part) for part in text.split(","))


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

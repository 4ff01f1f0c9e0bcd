"""What tests of all kinds share: how long to wait, how to compare. It needs no MPI."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcaccum import InvalidArgumentError, cli

# Seconds a test waits for something that takes milliseconds.  Virtual machines stand
# still for a minute at times.  It is well below the time limit of a test, so that the
# message is the timeout's.
WAIT = 150.0

# Seconds of a wait that is meant to time out.
VAIN = 0.05


def same_bits(found: Any, expected: Any) -> None:
    """Compare values, shape and dtype."""
    expected = np.asarray(expected)
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    equal = found.tobytes() == expected.tobytes()
    # Not in one line: pytest would compute a diff of all bytes, which takes minutes.
    assert equal, f"{found} is not {expected}"


def check_error(
    error: Any, *texts: str, kind: type[Exception] = InvalidArgumentError
) -> None:
    """Check what a call has raised, and what its message contains."""
    assert type(error) is kind, repr(error)
    for text in texts:
        assert text in str(error)


def json_lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def status_of(*words: str) -> Any:
    """Return the exit status of a command, which runs in this process."""
    try:
        return cli.main([*words])
    except SystemExit as leaving:
        return leaving.code


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Mark every second of many cases that are alike: CI leaves it out."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            marks=[pytest.mark.thorough] * (number % 2),
        )
        for number, case in enumerate(cases)
    ]


def every_pair(*dimensions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which any two values of two dimensions are together once.

    For parameters that the code does not treat specially three at a time. There are
    about as many cases as pairs of values of the two longest dimensions.
    """
    values = [[*dimension] for dimension in dimensions]
    left = [*itertools.product(*map(range, map(len, values)))]
    wanted = set().union(*map(_pairs, left))
    chosen = []
    while wanted:
        best = max(left, key=lambda case: len(_pairs(case) & wanted))
        wanted -= _pairs(best)
        chosen.append(best)
    # In the order of the product, which tests of fixtures are sorted by.
    return [tuple(map(list.__getitem__, values, case)) for case in sorted(chosen)]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return {*itertools.combinations(enumerate(case), 2)}

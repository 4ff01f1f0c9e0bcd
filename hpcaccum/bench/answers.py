"""The gradients of benchmarks, and the check of what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.dtypes import Array


class WrongAnswerError(RuntimeError):
    """Raised if an operation gives a wrong result."""


def gradient(rank: int, count: int) -> Array:
    """Return the gradient of a rank: ``count`` elements of float32."""
    elements: Array = np.arange(count, dtype=np.float32) % 64
    elements += rank
    return elements


def sum_of_gradients(ranks: int, count: int) -> Array:
    """Return the sum of the gradients of the first ``ranks`` ranks."""
    total = gradient(0, count)
    total *= ranks
    total += ranks * (ranks - 1) / 2
    return total


def check_equal(actual: Array, expected: Any) -> None:
    """Raise WrongAnswerError if elements differ; show the first of them."""
    _check(actual, expected, actual != expected)


def check_close(actual: Array, expected: Array, error: float) -> None:
    """Do as `check_equal`, but permit an error relative to the largest element."""
    most = error * np.abs(expected).max(initial=0)
    _check(actual, expected, ~(np.abs(actual - expected) <= most))


def _check(actual: Array, expected: Any, are_wrong: Array) -> None:
    wrong = np.flatnonzero(are_wrong)
    if wrong.size:
        first = wrong[0]
        wanted = np.broadcast_to(expected, actual.shape).flat[first]
        raise WrongAnswerError(
            f"{wrong.size} of {actual.size} elements are wrong: number {first} is "
            f"{actual.flat[first]}, should be {wanted}"
        )

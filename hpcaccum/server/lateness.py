"""Factors of late gradients: less weight, where dropping them would give them none."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Literal

from hpcaccum.errors import InvalidArgumentError

# What `lateness=` accepts.
Lateness = Literal["inverse"] | Callable[[int], float] | None

# Larger lags have the factor of this one.
_MOST = 1000
_SHOWN = 4


def factors_of(lateness: Any, max_lag: float) -> Factors | None:
    """Return the factors of an option ``lateness``; None if all are 1."""
    return None if lateness is None else Factors(lateness, max_lag)


class Factors:
    """The factors of gradients by their lag, found before the first gradient comes.

    Ranks that compare its ``repr`` have the same factors, so each of them may apply one
    for the others.
    """

    def __init__(self, lateness: Any, max_lag: float) -> None:
        if lateness == "inverse":
            lateness = _inverse
        if not callable(lateness):
            raise InvalidArgumentError(
                f"lateness must be None, 'inverse' or a callable, got {lateness!r}"
            )
        lags = range(int(min(max(max_lag, 0), _MOST)) + 1)
        self._factors = tuple(_checked(lateness(lag), lag) for lag in lags)

    def __repr__(self) -> str:
        """Show the first ones, and a number that depends on all."""
        shown = ", ".join(f"{factor:g}" for factor in self._factors[:_SHOWN])
        return f"factors {shown}, ... (hash {hash(self._factors)})"

    def __call__(self, lag: int) -> float:
        """Return the factor of a lag."""
        return self._factors[min(max(lag, 0), len(self._factors) - 1)]


def _inverse(lag: int) -> float:
    return 1 / (1 + lag)


def _checked(factor: Any, lag: int) -> float:
    if isinstance(factor, numbers.Real) and 0 <= float(factor) <= 1:
        return float(factor)
    raise InvalidArgumentError(
        f"lateness({lag}) must be a number from 0 to 1, got {factor!r}"
    )

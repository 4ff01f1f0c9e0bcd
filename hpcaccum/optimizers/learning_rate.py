"""The learning rate of a rule: a number, or a callable that returns one."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError

_RATE = "learning_rate"

Rate = float | Callable[[], float] | Callable[[int], float]


def checked_number(value: Any, name: str, low: float, high: float = math.inf) -> float:
    """Return a finite number in [low, high)."""
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not low <= value < high:
        raise InvalidArgumentError(
            f"{name} must be a number {_span(low, high)}, got {value!r}"
        )
    return float(value)


def _span(low: float, high: float) -> str:
    if high < math.inf:
        return f"of at least {low:g} and less than {high:g}"
    return f"of at least {low:g}" if low > -math.inf else "that is finite"


def finite(rate: object) -> float | None:
    """Return a learning rate if it is a finite number; None if it is anything else."""
    # The common case first, as this is called in each step.
    if type(rate) is float or isinstance(rate, numbers.Real):
        return float(rate) if math.isfinite(rate) else None
    return None


class RateOfStep:
    """A checked learning rate: a number, or the result of a callable.

    Raises:
        InvalidArgumentError: If it is neither a number in range nor a callable with at
            most one required argument.
    """

    def __init__(self, rate: Any) -> None:
        self.given, self.takes_step = rate, False
        if callable(rate):
            self.takes_step = _takes_step(rate)
        else:
            self.given = checked_number(rate, _RATE, 0)

    def at(self, step: Callable[[], int]) -> float:
        """Return the rate of an update; ``step`` returns the number of earlier ones."""
        if not callable(self.given):
            return self.given  # type: ignore[no-any-return]
        rate = self.given(step()) if self.takes_step else self.given()
        return checked_number(rate, _RATE, 0)


def _takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable requires an argument; an optional one is left out."""
    try:
        signature = inspect.signature(rate)
    except (TypeError, ValueError):
        return False
    for arguments in ((), (0,)):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return bool(arguments)
    raise InvalidArgumentError(
        f"{_RATE} must be a number, or a callable without arguments or with one, the "
        f"step; got a callable of {signature}"
    )

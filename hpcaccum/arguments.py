"""Checks of what a caller passes: each returns the plain value or raises at once."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import FLOATS

Array = np.ndarray[Any, Any]


def step_number(value: Any, name: str) -> int:
    """Return one number as a step; fractions are cut off towards zero.

    Raises:
        InvalidArgumentError: If it is not exactly one real, finite number.
    """
    try:
        if type(value) is not int:
            array = np.asarray(value)
            if array.shape != () or array.dtype.kind not in "biufO":
                raise TypeError
            value = int(array[()])
        if -(2**63) <= value < 2**63:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgumentError(f"{name} must be one number of 64 bits, got {value!r}")


def positive_count(value: Any, name: str) -> int:
    """Return an integer of at least 1.

    Raises:
        TypeError: If it is a float or text.
        InvalidArgumentError: If it is less than 1, or None, or several numbers.
    """
    if value is None or np.ndim(value) != 0:
        raise InvalidArgumentError(f"{name} must be one integer, got {value!r}")
    try:
        count = operator.index(value[()] if isinstance(value, np.ndarray) else value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if count < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {count}")
    return count


def rank_number(value: Any, size: int, name: str) -> int:
    """Return a rank of a communicator of ``size``.

    Raises:
        TypeError: If it is no integer.
        InvalidArgumentError: If there is no such rank.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a rank, got {value!r}")
    rank = int(value)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{name} must be a rank of the communicator (0 to {size - 1}), got {rank}"
        )
    return rank


def gradient_array(grad: Any, dtype: np.dtype[Any]) -> Array:
    """Return a gradient as an array, which is not yet converted to ``dtype``.

    Raises:
        InvalidArgumentError: If it is None, ragged, or not of real numbers.
    """
    if grad is None:
        raise InvalidArgumentError("gradient must be an array, got None")
    try:
        array = np.asarray(grad)
    except ValueError as error:
        raise InvalidArgumentError(f"gradient is not an array: {error}") from None
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf" and array.dtype not in FLOATS:
        raise InvalidArgumentError(
            f"gradient of dtype {array.dtype} cannot be cast safely to {dtype}"
        )
    return array

"""Checks of arguments. Each returns the checked value, or raises an error."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from typing import Any

import numpy as np

from hpcaccum.device import check_array, is_device
from hpcaccum.dtypes import (
    FLOATS,
    Array,
    accumulation_dtype,
    check_unmasked,
    float_dtype,
)
from hpcaccum.errors import InvalidArgumentError

REDUCTIONS = ("MEAN", "SUM")
# Seconds in each unit of a time.
_UNITS = {"s": 1, "m": 60, "h": 3600}
# Bytes that one MPI call moves at most: counts are of 32 bits.
_MAX_BUCKET = 1 << 30


def step_number(value: Any, name: str) -> int:
    """Return a number as a step, rounded toward zero."""
    try:
        if type(value) is not int:
            # A `Variable` has one.
            array = np.asarray(getattr(value, "value", value))
            if array.shape != () or array.dtype.kind not in "biufO":
                raise TypeError
            value = int(array[()])
        if -(2**63) <= value < 2**63:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgumentError(f"{name} must be one number of 64 bits, got {value!r}")


def integer(value: Any, name: str) -> int:
    """Return an integer; raise TypeError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def positive_count(value: Any, name: str) -> int:
    """Return an integer of at least 1; a float or a text is a TypeError."""
    if value is None or np.ndim(value) != 0:
        raise InvalidArgumentError(f"{name} must be one integer, got {value!r}")
    count = integer(value[()] if isinstance(value, np.ndarray) else value, name)
    if count < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {count}")
    return count


def positive_weight(value: Any, dtype: np.dtype[Any]) -> float:
    """Return the weight of gradients summed in ``dtype``: finite and above 0."""
    if type(value) is float and value == 1.0:
        # Almost always.
        return 1.0
    number = math.nan
    with contextlib.suppress(TypeError, ValueError):
        array = np.asarray(value)
        if array.shape == () and (array.dtype.kind in "iuf" or array.dtype in FLOATS):
            number = float(array)
    limits = np.finfo(dtype)
    if float(limits.tiny) <= number <= float(limits.max):
        return number
    raise InvalidArgumentError(
        f"weight must be a finite number above 0 (of {dtype}), got {value!r}"
    )


def seconds(value: Any, name: str) -> float:
    """Return the seconds of a time: a number, or a text such as 90s, 5m or 1h."""
    number, unit = value, 1
    try:
        if isinstance(value, str):
            number, unit = value[:-1], _UNITS[value[-1:]]
        if 0 < float(number) < math.inf:
            return float(number) * unit
    except (KeyError, TypeError, ValueError):
        pass
    raise InvalidArgumentError(f"{name} must look like 90s, 5m or 1h, got {value!r}")


def rank_number(value: Any, size: int, name: str) -> int:
    """Return a rank of a communicator of ``size``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a rank, got {value!r}")
    rank = int(value)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{name} must be a rank of the communicator (0 to {size - 1}), got {rank}"
        )
    return rank


def result_array(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the array for a result: ``out``, or a new one if that is None."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) and not is_device(out):
        raise InvalidArgumentError(f"out must be an array, got {type(out).__name__}")
    if (out.dtype, out.shape) != (dtype, shape):
        raise InvalidArgumentError(
            f"out must be {dtype} {shape}, got {out.dtype} {out.shape}"
        )
    if is_device(out):
        check_array("out", out, FLOATS)
    elif not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidArgumentError("out must be contiguous and writable")
    return out  # type: ignore[no-any-return]


def gradient_array(grad: Any, dtype: np.dtype[Any], what: str = "gradient") -> Array:
    """Return a gradient as an array that can be converted to ``dtype``."""
    if grad is None:
        raise InvalidArgumentError(f"{what} must be an array, got None")
    if is_device(grad):
        check_array(what, grad, FLOATS)
        return grad  # type: ignore[no-any-return]
    if type(grad) is not np.ndarray:
        check_unmasked(what, grad)
    try:
        array = np.asarray(grad)
    except ValueError as error:
        raise InvalidArgumentError(f"{what} is not an array: {error}") from None
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf" and array.dtype not in FLOATS:
        raise InvalidArgumentError(
            f"{what} of dtype {array.dtype} cannot be cast safely to {dtype}"
        )
    return array


def fitting(what: str, given: Any, own: Array) -> Array:
    """Return an array of the shape of ``own`` and of any real dtype, for a copy."""
    array = gradient_array(given, own.dtype, what)
    if array.shape != own.shape:
        raise InvalidArgumentError(
            f"{what} must have shape {own.shape}, got {array.shape}"
        )
    return array


def one_of(what: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise InvalidArgumentError unless a value is one of the allowed ones."""
    if value not in allowed:
        raise InvalidArgumentError(f"{what} must be one of {allowed}, got {value!r}")


def bucket_size(nbytes: Any) -> int | None:
    """Check ``bucket_bytes``; None selects the default of the schedule."""
    if nbytes is None:
        return None
    try:
        number = operator.index(nbytes)
    except TypeError:
        number = 0
    if not 1 << 10 <= number <= _MAX_BUCKET:
        raise InvalidArgumentError(
            f"bucket_bytes must be 1024 to {_MAX_BUCKET}, got {nbytes!r}"
        )
    return number


def check_wire_dtype(wire_dtype: Any) -> str | None:
    """Return the name of a dtype in which gradients may travel; None for their own."""
    return None if wire_dtype is None else str(float_dtype(wire_dtype, "wire_dtype"))


def wire_format(wire_dtype: Any, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype in which sums of ``dtype`` are sent; None for their own."""
    if wire_dtype is None:
        return None
    wire, wide = float_dtype(wire_dtype, "wire_dtype"), accumulation_dtype(dtype)
    if wire.itemsize >= wide.itemsize:
        raise InvalidArgumentError(
            f"wire_dtype must be narrower than {wide}, got {wire}"
        )
    return wire


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array as ``dtype``; values that are too large become infinity."""
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)

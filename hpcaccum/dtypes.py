"""Dtypes that can be accumulated, and the dtype in which each is summed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hpcaccum.errors import InvalidArgumentError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
FLOATS = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype that ``dtype`` names, one that can be accumulated.

    Raises:
        TypeError: If it names no dtype, or bool, or text.
        InvalidArgumentError: If it is numeric but not float16/32/64 or bfloat16.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must name a float type, got {dtype!r}") from None
    if dtype is None or found.kind in "bSUO":
        raise TypeError(f"dtype must name a float type, got {dtype!r}")
    if found not in FLOATS:
        names = ", ".join(str(each) for each in FLOATS)
        raise InvalidArgumentError(f"dtype must be one of {names}, got {found}")
    return found


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which gradients of ``dtype`` are summed.

    Half precision loses a sum: 2100 ones average to 0.975 in float16.
    """
    return np.dtype(np.float32) if dtype in HALVES else dtype

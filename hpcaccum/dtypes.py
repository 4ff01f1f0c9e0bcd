"""The types of arrays: dtypes of gradients, and the dtype in which each is summed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from hpcaccum.errors import InvalidArgumentError

# Any shape and dtype, for annotations; on a device it stands for `cupy.ndarray`.
Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
FLOATS = (*HALVES, np.dtype(np.float32), np.dtype(np.float64))


def quiet() -> np.errstate:
    """Return a context without warnings: an overflow shows up as inf in the result."""
    return np.errstate(all="ignore")


def float_dtype(dtype: Any, what: str = "dtype") -> np.dtype[Any]:
    """Return ``dtype`` as a NumPy dtype that can be accumulated."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{what} must name a float type, got {dtype!r}") from None
    if dtype is None or found.kind in "bSUO":
        raise TypeError(f"{what} must name a float type, got {dtype!r}")
    if found not in FLOATS:
        names = ", ".join(str(each) for each in FLOATS)
        raise InvalidArgumentError(f"{what} must be one of {names}, got {found}")
    return found


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which gradients of ``dtype`` are summed.

    Half precision is summed in float32: in float16, the mean of 2100 ones is 0.975.
    """
    return np.dtype(np.float32) if dtype in HALVES else dtype


def check_unmasked(what: str, given: Any) -> None:
    """Raise InvalidArgumentError for a masked array: the mask would be lost."""
    if isinstance(given, np.ma.MaskedArray):
        raise InvalidArgumentError(
            f"{what} must have no mask, got a masked array; pass its filled(0) to use "
            f"zeros for masked elements"
        )

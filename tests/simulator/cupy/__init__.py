"""A simulated CuPy: device memory is host memory, and work runs late.

For tests of code that uses CuPy, where there is no GPU. What is here behaves as CuPy
does, also where it refuses; what is not here does not exist. See `_queues` for when
work runs.

Environment:
    CUPY_SIMULATOR_DEVICES: How many devices, 1 by default; 0 is a machine without a
        driver.
    CUPY_SIMULATOR_ARCH: Their compute capability, 90 by default.
    CUPY_SIMULATOR_SEED: Of the moments at which work runs early, 0 by default.
    CUPY_SIMULATOR_PROGRESS: How likely that is, 0.2 by default; 0 is the latest.
"""

from __future__ import annotations

from numpy import (
    bool_,
    can_cast,
    complex64,
    complex128,
    dtype,
    e,
    finfo,
    float16,
    float32,
    float64,
    floating,
    generic,
    iinfo,
    inf,
    int8,
    int16,
    int32,
    int64,
    integer,
    issubdtype,
    nan,
    newaxis,
    number,
    pi,
    promote_types,
    uint8,
    uint16,
    uint32,
    uint64,
)

from . import _routines, cuda, linalg, random
from ._ndarray import from_dlpack, ndarray
from ._raw import RawKernel, RawModule
from ._routines import *  # noqa: F403
from .cuda import is_available

__version__ = "14.0.simulated"

__all__ = [
    *_routines.__all__,
    "RawKernel",
    "RawModule",
    "bool_",
    "can_cast",
    "complex64",
    "complex128",
    "cuda",
    "dtype",
    "e",
    "finfo",
    "float16",
    "float32",
    "float64",
    "floating",
    "from_dlpack",
    "generic",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "integer",
    "is_available",
    "issubdtype",
    "linalg",
    "nan",
    "ndarray",
    "newaxis",
    "number",
    "pi",
    "promote_types",
    "random",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

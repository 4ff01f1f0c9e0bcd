"""A simulated CuPy: device memory is host memory, and work runs late.

For tests of code that uses CuPy, where there is no GPU. What is here behaves as CuPy
does, also where it refuses; what is not here does not exist. See `_queues` for when
work runs.

Environment:
    CUPY_SIMULATOR_DEVICES: How many devices, 1 by default; 0 is a machine without a
        driver.
    CUPY_SIMULATOR_SEED: Of the moments at which work runs early, 0 by default.
"""

from __future__ import annotations

from . import _routines, cuda, linalg, random
from ._ndarray import from_dlpack, ndarray
from ._raw import RawModule
from ._routines import *  # noqa: F403

__version__ = "14.0.simulated"

__all__ = [
    *_routines.__all__,
    "RawModule",
    "cuda",
    "from_dlpack",
    "linalg",
    "ndarray",
    "random",
]

"""Whether device memory may be handed to the MPI library that is loaded.

To an MPI that is not CUDA-aware a device pointer is a bad host address: the rank dies
of a segmentation fault, not of an exception. So nothing is ever guessed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi.runtime import MPI

VARIABLE = "HPCACCUM_CUDA_AWARE"

_LIBRARIES = ("libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so")


class Answer(NamedTuple):
    """Whether MPI takes device memory, and who says so."""

    aware: bool
    reason: str


@functools.cache
def cuda_awareness() -> Answer:
    """Ask the library that is loaded; HPCACCUM_CUDA_AWARE=0 or 1 answers for it.

    Raises:
        InvalidArgumentError: If the variable is something else.

    Source: MPIX_Query_cuda_support of Open MPI and MPICH; "mpi_memory_alloc_kinds" of
    MPI-4.1, 11.4.3; MPICH_GPU_SUPPORT_ENABLED of Cray MPICH.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced:
        if forced not in ("0", "1"):
            raise InvalidArgumentError(f"{VARIABLE} must be 0 or 1, got {forced!r}")
        return Answer(forced == "1", f"{VARIABLE}={forced}")
    info = MPI.COMM_WORLD.Get_info()  # loads the library
    if (query := getattr(_loaded(), "MPIX_Query_cuda_support", None)) is not None:
        return Answer(bool(query()), "MPIX_Query_cuda_support")
    # Never by a session: Open MPI echoes there what it was asked for.
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return Answer(True, f"mpi_memory_alloc_kinds={kinds}")
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return Answer(True, "MPICH_GPU_SUPPORT_ENABLED=1")
    return Answer(False, "the library does not say so")


def _loaded() -> ctypes.CDLL | None:
    """Return the MPI library of this process; never load another one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(_LIBRARIES):
            try:
                return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            except OSError:
                continue
    return None

"""Find out whether the MPI library accepts device memory.

For a library that is not CUDA-aware, a device pointer is an invalid address: the rank
ends with a segmentation fault, not with an exception. So the answer is never a guess.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi.job.runtime import MPI

VARIABLE = "HPCACCUM_CUDA_AWARE"

_LIBRARIES = ("libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi_cray.so")


class CudaAwareness(NamedTuple):
    """Whether the MPI library accepts device memory, and the source of that."""

    aware: bool
    reason: str


@functools.cache
def cuda_awareness() -> CudaAwareness:
    """Ask the MPI library; HPCACCUM_CUDA_AWARE=0 or 1 overrides its answer.

    Source: MPIX_Query_cuda_support of Open MPI and MPICH; "mpi_memory_alloc_kinds" of
    MPI-4.1, 11.4.3; MPICH_GPU_SUPPORT_ENABLED of Cray MPICH.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced:
        if forced not in ("0", "1"):
            raise InvalidArgumentError(f"{VARIABLE} must be 0 or 1, got {forced!r}")
        return CudaAwareness(forced == "1", f"{VARIABLE}={forced}")
    world = MPI.COMM_WORLD  # loads the library
    if (query := getattr(_loaded(), "MPIX_Query_cuda_support", None)) is not None:
        return CudaAwareness(bool(query()), "MPIX_Query_cuda_support")
    # Not from the info of a session: Open MPI returns what was requested there.
    info = world.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return CudaAwareness(True, f"mpi_memory_alloc_kinds={kinds}")
    if os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return CudaAwareness(True, "MPICH_GPU_SUPPORT_ENABLED=1")
    return CudaAwareness(False, "the library does not declare support")


def _loaded() -> ctypes.CDLL | None:
    """Return the MPI library of this process, without loading another one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(_LIBRARIES):
            try:
                return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            except OSError:
                continue
    return None

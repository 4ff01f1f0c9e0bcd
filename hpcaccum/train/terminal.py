"""Detection of the terminal, also behind a launcher.

MPICH's mpiexec gives rank 0 a pipe even on a terminal; Open MPI's gives it a terminal
even if its output goes to a file. So the launcher's own output decides.
"""

from __future__ import annotations

import os
import sys

from hpcaccum.mpi import ancestors

_USUAL = 80

_LAUNCHERS = {"mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun"}
# What Open MPI's launcher starts on other machines.
_DAEMONS = {"prted", "orted"}


def columns() -> int | None:
    """Return the width of the terminal that shows this output; None without one."""
    try:
        launcher = _launcher()
        if launcher is None:
            return _width(sys.stdout.fileno())
        # On Linux this opens the file that the launcher writes to.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        output = os.open(f"/proc/{launcher}/fd/1", flags)
        try:
            return _width(output)
        finally:
            os.close(output)
    except (OSError, ValueError):
        return None


def _width(output: int) -> int | None:
    if not os.isatty(output):
        return None
    # Some terminals report 0 columns.
    return os.get_terminal_size(output).columns or _USUAL


def _launcher() -> int | None:
    """Return the process id of the launcher, None without one."""
    for process, name in ancestors():
        if name in _DAEMONS:
            raise OSError(f"{name} was started from another machine")
        if name in _LAUNCHERS:
            return process
    return None

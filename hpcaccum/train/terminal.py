"""Whether somebody looks at a terminal, behind a launcher too.

MPICH's mpiexec gives rank 0 a pipe, also on a terminal; Open MPI's gives it a terminal,
also if its output goes to a file. So it is the launcher's own output that counts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_USUAL = 80

_LAUNCHERS = {"mpiexec", "mpiexec.hydra", "mpirun", "orterun", "prterun"}


def columns() -> int | None:
    """Return the width of the terminal that shows this output; None if none does."""
    try:
        launcher = _launcher()
        if launcher is None:
            return _width(sys.stdout.fileno())
        # A second way to the file that the launcher writes to (Linux).
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
    # Some terminals do not know their size and say 0.
    return os.get_terminal_size(output).columns or _USUAL


def _launcher() -> int | None:
    """Return the process that started this one as a rank, if it is on this machine."""
    process = os.getppid()
    while process > 1 and (folder := Path(f"/proc/{process}")).exists():
        # "pid (name) state parent ..."; a name may have spaces and parentheses.
        about, _, rest = (folder / "stat").read_text().rpartition(")")
        if about.partition("(")[2] in _LAUNCHERS:
            return process
        process = int(rest.split()[1])
    return None

"""The processes of the ranks, and whether they exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hpcaccum.mpi.runtime import MPI


class Process(NamedTuple):
    """A rank's process: its host, its number there and when it was started."""

    host: str
    number: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """Return that of this rank."""
        number = os.getpid()
        return cls(MPI.Get_processor_name(), number, _start_time(number))

    def exists(self) -> bool:
        """Whether it runs on this rank's node."""
        return _start_time(self.number) == self.started


def _start_time(process: int) -> str:
    """Return when a process of this node was started, "" if there is none now."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # After the name, which may contain spaces. Source: proc(5), fields 3 and 22.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]

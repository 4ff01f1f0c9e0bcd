"""The processes of the ranks, and what the ranks must know of each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from hpcaccum.deadline import limit_of_environment
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi.job.launcher import stat
from hpcaccum.mpi.job.runtime import MPI

HEARTBEAT = "HPCACCUM_HEARTBEAT"
# Seconds without a message after which a rank is missing, if the variable is not set.
# A computation that holds Python's interpreter lock delays messages for as long.
_LIMIT = 300.0
# What is done when a rank is lost.
ON_LOSS = "HPCACCUM_ON_LOSS"
_CONTINUE, _ABORT = "continue", "abort"


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
    _, fields = stat(process)
    # Fields 3 and 22.
    return "" if not fields or fields[0] in "ZX" else fields[19]


class Facts(NamedTuple):
    """Of a rank: its limit, its process, and whether its threads may call MPI.

    And whether the job may go on without a rank.
    """

    limit: float
    process: Process
    threads: bool
    goes_on: bool

    @classmethod
    def own(cls) -> Facts:
        """Return those of this rank; raise if its environment is invalid."""
        limit = limit_of_environment(HEARTBEAT, _LIMIT)
        choice = os.environ.get(ON_LOSS, _CONTINUE)
        if choice not in (_CONTINUE, _ABORT):
            raise InvalidArgumentError(
                f"{ON_LOSS} must be {_CONTINUE!r} or {_ABORT!r}, got {choice!r}"
            )
        threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        return cls(limit, Process.own(), threads, choice == _CONTINUE)


def mates(facts: Sequence[Facts], rank: int) -> set[int]:
    """Return the other ranks of this rank's host whose processes it can see.

    In containers, processes of a host may not see each other.
    """
    own = facts[rank].process
    return {
        other
        for other, each in enumerate(facts)
        if each.process.host == own.host and other != rank and each.process.exists()
    }

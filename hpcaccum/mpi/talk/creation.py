"""Communicators, of which the threads of a process make one at a time where they must.

Each thread may have a communicator of its own. But mpi4py holds the interpreter lock in
the first sum of objects on one; and Open MPI (5.0) lets threads that make communicators
of different ranks wait for each other without end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.job.runtime import MPI, is_open_mpi
from hpcaccum.mpi.talk.requests import complete

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

_WHAT = "making a communicator"
# Held by one communicator at a time, on all its ranks.
_one = threading.Lock()
# When threads have begun calls of MPI that wait for all ranks.
_begun: list[float] = []
# Microseconds, at most, before the first try that follows another one.
_PAUSE = 1000


def duplicate(comm: mpi4py_MPI.Intracomm) -> mpi4py_MPI.Intracomm:
    """Return a duplicate of a communicator. Collective."""
    with creating(comm):
        return comm.Dup()


def split(comm: mpi4py_MPI.Intracomm, color: int, key: int) -> Any:
    """Return the part of a communicator that has this rank's color. Collective."""
    with creating(comm):
        return comm.Split(color, key)


def split_by_node(comm: mpi4py_MPI.Intracomm) -> Any:
    """Return the part of a communicator on the node of this rank. Collective."""
    with creating(comm):
        return comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)


@contextlib.contextmanager
def creating(
    comm: mpi4py_MPI.Intracomm, what: str = _WHAT, missing: str = "all its ranks"
) -> Iterator[None]:
    """Make a communicator of some of these ranks in the block. Collective."""
    ordered = is_open_mpi()
    with waiting(), alone(comm, what, missing) if ordered else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Note that the block waits in MPI for all ranks, also for those that are lost."""
    now = time.monotonic()
    _begun.append(now)
    try:
        yield
    finally:
        _begun.remove(now)


def seconds_waiting() -> float:
    """Return for how long a thread of this rank has been in `waiting`; 0 if none."""
    return max((time.monotonic() - begun for begun in list(_begun)), default=0.0)


@contextlib.contextmanager
def alone(comm: mpi4py_MPI.Intracomm, what: str, missing: str) -> Iterator[None]:
    """Run the block while no other thread of these ranks runs such a block. Collective.

    No rank waits for the lock: ranks would take it for two communicators in different
    orders. They try at the same time, and again if one has failed. At first they only
    meet, as another thread may have to make a communicator before all are here.
    """
    deadline = Deadline(None, what)
    _all(comm, False, deadline, missing)
    for tries in itertools.count():
        if tries:
            # Programs may seed the generator of `random` alike on all ranks.
            time.sleep((_PAUSE << min(tries, 5)) / 1e6 * os.urandom(1)[0] / 256)
        holds = _one.acquire(blocking=False)
        try:
            if _all(comm, holds, deadline, missing):
                yield
                return
        finally:
            if holds:
                _one.release()


def _all(
    comm: mpi4py_MPI.Intracomm, fact: bool, deadline: Deadline, missing: str
) -> bool:
    """Return whether a fact is true on all ranks. Collective."""
    mine, least = np.array([int(fact)]), np.empty(1, int)
    begun = comm.Iallreduce(mine, least, MPI.MIN)
    complete([begun], deadline, lambda: missing, (mine, least))
    return bool(least[0])

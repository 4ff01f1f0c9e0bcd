"""MPI windows: memory of one rank that all ranks reach one-sidedly.

`AtomicWords` and `Region` are what is in them. All windows come from MPI_Win_allocate
and are locked once, with Lock_all, when they are made. A window over existing memory,
or a lock around each operation, makes MPICH wait for a target that computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hpcaccum.errors import FreedError
from hpcaccum.mpi.job.runtime import MPI
from hpcaccum.mpi.job.shutdown import at_end, count_open
from hpcaccum.mpi.memory.node_memory import check_room, explained, pieces
from hpcaccum.mpi.talk.creation import creating, duplicate, waiting
from hpcaccum.mpi.talk.group import Group


class _Freed:
    """Stands for a window that was freed: MPI may end the job for its use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise FreedError("its windows were freed")


FREED: Any = _Freed()


def allocate(group: Group, root: int, nbytes: int, unit: int) -> Any:
    """Return a locked window with memory on one rank, all zeros. Collective.

    MPICH crashes instead of returning an error: with SIGSEGV if it has no communicator
    left for a window, and with SIGBUS at the first touch if the node has too little
    shared memory. So both are checked first, and raise an error on every rank.
    """
    local = nbytes if group.rank == root else 0

    def check() -> dict[str, object]:
        check_room(local, group.node.size)
        return {}

    group.agree("allocating a window", check)
    _check_communicators(group)
    make = MPI.Win.Allocate_shared if group.single_node else MPI.Win.Allocate
    with creating(group.comm):
        window: Any = make(local, unit, comm=group.comm)
    failure = _clear(window.tomemory(), group.node.size) if local else None
    window.Lock_all(MPI.MODE_NOCHECK)
    window.Sync()
    try:
        # This also keeps other ranks from the memory until it is zero.
        group.raise_together("allocating a window", failure)
    except BaseException:
        free(window)
        raise
    return window


@functools.cache
def memory_barrier() -> Callable[[], None]:
    """Return what orders the loads and stores of a rank that shares no window."""
    # A window of this rank alone, which lives until MPI ends.
    window: Any = MPI.Win.Allocate(0, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    at_end(functools.partial(free, window))
    return window.Sync  # type: ignore[no-any-return]


def free(window: Any) -> None:
    """Unlock and free a window. Collective."""
    with waiting():
        window.Unlock_all()
        window.Free()


def _check_communicators(group: Group) -> None:
    """Raise on all ranks if MPI can make no communicator, as a window needs one."""
    try:
        duplicate(group.comm).Free()
    except MPI.Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(
            f"MPI cannot create another window: {count_open()} objects of hpcaccum are "
            f"open on this rank; free those that are not needed, or put several arrays "
            f"into one: {reason}"
        ) from None


def _clear(memory: Any, ranks: int) -> Exception | None:
    """Set memory to zeros; return the error if the node has too little of it."""
    whole = memoryview(memory).cast("B")
    # A system call that cannot write to a page returns an error; a store is a SIGBUS.
    try:
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            for begin, size in pieces(0, len(whole), ranks):
                zeros.readinto(whole[begin : begin + size])
    except OSError as error:
        return explained(error, len(whole))
    return None

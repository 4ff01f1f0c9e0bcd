"""Requests of MPI: waits that may fail, and calls after another process has died.

After an exception MPI goes on with the memory of a request. A request of mpi4py keeps
an array that was passed as such, but not one of a list with counts and a datatype.

Libraries with ULFM, such as Open MPI, raise an error in a call that concerns a process
which has died, and in a look for messages of any rank, until it is acknowledged.
MPICH raises none.

Source: W. Bland et al., Post-failure recovery of MPI communication capability, 2013.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.job.runtime import MPI

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

_kept: list[object] = []
# Requests that were given up, each with its memory.
_given_up: list[tuple[list[Any], object]] = []
# Two threads must not test a request at a time. Reentrant, for a signal handler that
# saves.
_lock = threading.RLock()


def keep(used: object) -> None:
    """Keep an object until the program ends: MPI may still use its memory."""
    _kept.append(used)


def complete(
    requests: Iterable[Any],
    deadline: Deadline,
    missing: Callable[[], str],
    memory: object = None,
    check: Callable[[], bool | None] = lambda: None,
) -> None:
    """Wait until requests are complete; an iterator may begin them.

    ``memory`` is what they use and do not keep. ``check`` is called after each look; it
    raises if they cannot complete. Raises WaitTimeoutError as `Deadline.wait`.
    """
    if _given_up:
        # Until then MPICH takes their communicator for one in use, and its group is not
        # closed when the user frees it.
        with _lock:
            _given_up[:] = [it for it in _given_up if not MPI.Request.Testall(it[0])]
    begun: list[Any] = []
    try:
        begun.extend(requests)
        deadline.wait(
            lambda: MPI.Request.Testall(begun) or check(), missing, moves_data=True
        )
    except BaseException:
        with _lock:
            _given_up.append((begun, memory))
        raise


# After another process has died


@functools.cache
def _failures() -> tuple[int, ...]:
    """Return the classes of these errors; none if the library has no ULFM."""
    found = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
    return () if MPI.ERR_UNKNOWN in found else found


def _is_failure(error: Any) -> bool:
    """Whether an MPI.Exception says that a process has died."""
    return error.Get_error_class() in _failures()


def receive(comm: mpi4py_MPI.Comm, tag: int) -> tuple[int, Any] | None:
    """Return a message of any rank that has arrived, after its source; None if none."""
    while True:
        try:
            # Quickly, if nothing has: ranks that wait do this again and again.
            if not comm.Iprobe(MPI.ANY_SOURCE, tag):
                return None
            status = MPI.Status()
            # Matched: another call would fail if its sender has died meanwhile.
            message = comm.improbe(MPI.ANY_SOURCE, tag, status)
            if message is not None:
                return status.Get_source(), message.recv()
        except MPI.Exception as error:
            if not _is_failure(error):
                raise
            comm.Ack_failed()


def is_complete(request: Any, after_failure: bool = True) -> bool:
    """Return whether a request is complete; None is one that could not begin.

    ``after_failure`` is what is returned if the other rank has died.
    """
    try:
        return after_failure if request is None else bool(request.Test())
    except MPI.Exception as error:
        if not _is_failure(error):
            raise
        return after_failure


def begun(begin: Callable[..., Any], *args: Any) -> Any:
    """Return the request that a call begins; None if the other rank has died."""
    try:
        return begin(*args)
    except MPI.Exception as error:
        if not _is_failure(error):
            raise
        return None

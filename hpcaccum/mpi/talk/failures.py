"""Calls of MPI that go on after another process has died.

Libraries with ULFM, such as Open MPI, raise an error in a call that concerns a process
which has died, and in a look for messages of any rank, until it is acknowledged.
MPICH raises none.

Source: W. Bland et al., Post-failure recovery of MPI communication capability, 2013.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hpcaccum.mpi.job.runtime import MPI

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI as mpi4py_MPI


@functools.cache
def _failures() -> tuple[int, ...]:
    """Return the classes of these errors; none if the library has no ULFM."""
    found = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
    return () if MPI.ERR_UNKNOWN in found else found


def is_failure(error: Any) -> bool:
    """Whether an MPI.Exception says that a process has died."""
    return error.Get_error_class() in _failures()


def may_receive(comm: mpi4py_MPI.Comm, source: int, tag: int) -> bool:
    """Return whether a message has arrived, as ``Iprobe`` does."""
    try:
        return comm.Iprobe(source, tag)
    except MPI.Exception as error:
        _acknowledge(comm, error)
        return False


def _acknowledge(comm: mpi4py_MPI.Comm, error: Any) -> None:
    if not is_failure(error):
        raise error
    comm.Ack_failed()


def receive(comm: mpi4py_MPI.Comm, tag: int) -> tuple[int, Any] | None:
    """Return a message of any rank that has arrived, after its source; None if none."""
    # Quickly, if nothing has: ranks that wait do this again and again.
    while may_receive(comm, MPI.ANY_SOURCE, tag):
        status = MPI.Status()
        try:
            # Matched: another call would fail if its sender has died meanwhile.
            message = comm.improbe(MPI.ANY_SOURCE, tag, status)
            if message is not None:
                return status.Get_source(), message.recv()
        except MPI.Exception as error:
            _acknowledge(comm, error)
    return None


def is_complete(request: Any, after_failure: bool = True) -> bool:
    """Return whether a request is complete.

    Args:
        request: It may be None, for one that could not begin.
        after_failure: What is returned if the other rank has died.
    """
    try:
        return after_failure if request is None else bool(request.Test())
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return after_failure


def begun(begin: Callable[..., Any], *args: Any) -> Any:
    """Return the request that a call begins; None if the other rank has died."""
    try:
        return begin(*args)
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return None

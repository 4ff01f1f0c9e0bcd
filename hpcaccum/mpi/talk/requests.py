"""Waits for requests of MPI, whose memory outlives a wait that fails.

After an exception MPI goes on with the memory of a request. A request of mpi4py keeps
an array that was passed as such, but not one of a list with counts and a datatype.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from hpcaccum.mpi.job.runtime import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpcaccum.deadline import Deadline

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
    check: Callable[[], object] | None = None,
) -> None:
    """Wait until requests are complete.

    Args:
        requests: May be an iterator that begins them.
        deadline: Of the call.
        missing: As for `Deadline.wait`.
        memory: What the requests use and do not keep.
        check: As for `Deadline.wait`.

    Raises:
        WaitTimeoutError: If it takes too long.
    """
    _free_given_up()
    begun: list[Any] = []
    try:
        begun.extend(requests)
        deadline.wait(
            lambda: MPI.Request.Testall(begun) or None,
            missing,
            check=check,
            moves_data=True,
        )
    except BaseException:
        with _lock:
            _given_up.append((begun, memory))
        raise


def _free_given_up() -> None:
    """Free the requests that are complete.

    Until then MPICH takes their communicator for one in use, and its group is not
    closed when the user frees it.
    """
    if _given_up:
        with _lock:
            _given_up[:] = itertools.filterfalse(_are_complete, _given_up)


def _are_complete(given_up: tuple[list[Any], object]) -> bool:
    return MPI.Request.Testall(given_up[0])

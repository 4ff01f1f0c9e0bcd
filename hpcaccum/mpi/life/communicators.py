"""The group of each communicator of the user."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, cast

from hpcaccum.deadline import Deadline
from hpcaccum.errors import WaitTimeoutError
from hpcaccum.mpi.job.runtime import MPI, check_running
from hpcaccum.mpi.job.shutdown import abort_because
from hpcaccum.mpi.life.lifetime import Objects
from hpcaccum.mpi.talk.creation import alone, creating
from hpcaccum.mpi.talk.group import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI as mpi4py_MPI

_FIRST_USE = "first use of a communicator"
_UNREACHED = (
    "MPI to connect this rank to others: can all nodes reach each other? If an "
    "interface joins only some of them, name another one (Open MPI: "
    "OMPI_MCA_btl_tcp_if_include)"
)
# The keyval; and what is held while it is made, as threads must not make two.
_keyvals: list[int] = []
_making = threading.Lock()


def group_of(comm: mpi4py_MPI.Comm | Group | None = None) -> Group:
    """Return the group of a communicator; make it at the first call. Collective.

    All objects that are made on a communicator share its group.

    Args:
        comm: An intracommunicator, or None for COMM_WORLD. A `Group` is returned
            unchanged.

    Raises:
        TypeError: If ``comm`` is something else.
        FreedError: After MPI.Finalize().
        WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if not all ranks make the
            first call.
        InvalidArgumentError: On every rank, if HPCACCUM_HEARTBEAT or HPCACCUM_ON_LOSS
            is invalid on one.
    """
    check_running(MPI)
    if isinstance(comm, Group):
        return comm
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        got = "COMM_NULL" if comm == MPI.COMM_NULL else repr(comm)
        raise TypeError(f"comm must be an MPI intracommunicator, got {got}")
    group: Any = comm.Get_attr(_keyval())
    if group is None or group.comm == MPI.COMM_NULL:
        duplicate = _duplicate(comm)
        with _limit(_FIRST_USE, _UNREACHED):
            group = _make(duplicate, comm)
        comm.Set_attr(_keyval(), group)
        Objects.of(group).watch()
    return cast(Group, group)


def _keyval() -> int:
    with _making:
        if not _keyvals:
            _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_close))
        return _keyvals[0]


def _close(_comm: Any, _key: int, group: Group) -> None:
    # MPI calls this when the user's communicator is freed.
    Objects.of(group).close()


def _duplicate(comm: mpi4py_MPI.Intracomm) -> mpi4py_MPI.Intracomm:
    """Duplicate a communicator; warn, or time out, if ranks are missing."""
    # It raises if the limit is invalid, and nothing would free the duplicate.
    deadline = Deadline(None, _FIRST_USE)
    missing = (
        "the other ranks to make their first object of hpcaccum on it (which of "
        f"its {comm.size} ranks are missing is not known yet)"
    )
    with creating(comm, _FIRST_USE, missing):
        duplicate, request = comm.Idup()
        deadline.wait(lambda: request.Test() or None, lambda: missing)
    return duplicate


def _make(duplicate: mpi4py_MPI.Intracomm, comm: mpi4py_MPI.Intracomm) -> Group:
    """Return a new group; make the first sum of objects on its ranks. Collective."""
    group = Group(duplicate)
    # The first sum on a communicator, which the user may make later on, stops all
    # threads of a rank, a server among them, until all ranks have called it: mpi4py
    # duplicates the communicator then, and holds the interpreter lock. If other threads
    # did that on another communicator meanwhile, ranks would wait without end.
    main = threading.current_thread() is threading.main_thread()
    all_main = all(duplicate.allgather(main))
    with alone(duplicate, _FIRST_USE, _UNREACHED):
        comm.allreduce(0)
        # Another thread may be in a call on that one.
        if all_main and group.size == MPI.COMM_WORLD.size:
            MPI.COMM_WORLD.allreduce(0)
    return group


@contextlib.contextmanager
def _limit(what: str, missing: str) -> Iterator[None]:
    """Warn while the block waits inside MPI, and end the job at the limit.

    No `Deadline` reaches a call that blocks there.
    """
    # In the main thread, as it raises if the limit is invalid.
    deadline, done = Deadline(None, what), threading.Event()

    def watch() -> None:
        try:
            deadline.block(lambda s: done.wait(s) or None, lambda: missing)
        except WaitTimeoutError as error:
            abort_because(str(error))

    watching = threading.Thread(target=watch, daemon=True, name=what)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()

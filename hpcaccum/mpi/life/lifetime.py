"""The group of each communicator of the user, and the lifetime of objects on it.

Each object is freed once, at the latest by the end. While there are objects on a group,
its communicators are kept, and its heartbeat finds ranks that are lost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

from hpcaccum.deadline import Deadline, current_wait
from hpcaccum.errors import FreedError, LostRankError, WaitTimeoutError
from hpcaccum.mpi.job import shutdown
from hpcaccum.mpi.job.launcher import ends_job_at_output
from hpcaccum.mpi.job.runtime import MPI, check_running
from hpcaccum.mpi.life.heartbeat import Heartbeat
from hpcaccum.mpi.talk.creation import alone, creating, seconds_waiting
from hpcaccum.mpi.talk.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI
    from typing_extensions import Self

logger = logging.getLogger("hpcaccum")

# Seconds after which a call of MPI for all ranks waits for one that is lost.
_BLOCKED = 1.0
_NAME = "objects"


class Freeable:
    """An object whose `free` is collective, and has an effect once.

    A subclass overrides `_free`, and `_describe` for messages. If it must be freed
    before MPI_Finalize, it calls `_register` when it is complete.

    Attributes:
        label: Name with a number, which tells objects of one name apart and is the same
            on all ranks. Set by `_register`.
    """

    label: str
    _freed = False
    _retained: Group | None = None

    def _register(self, group: Group, label: str) -> None:
        """Have the object freed before MPI_Finalize, and watched. Collective."""
        self.label = label
        Objects.of(group).add(self)
        self._retained = group
        shutdown.at_exit(self._free_once, group.order)

    @property
    def freed(self) -> bool:
        """Whether it has been freed."""
        return self._freed

    def _check_open(self) -> None:
        """Raise FreedError if it has been freed."""
        if self.freed:
            raise FreedError(f"{self._describe()} was freed")

    def _describe(self) -> str:
        """Return what messages call the object."""
        return type(self).__name__

    def place(self) -> str:
        """Return how far this rank is, for messages; "" if the object has no steps.

        Any thread may call it, at any time; so it must not call MPI.
        """
        return ""

    def needs(self, rank: int) -> bool:
        """Whether the job cannot go on with the object once a rank is lost."""
        return True

    def lose(self, rank: int) -> None:
        """Note that a rank is lost; called by the thread of the heartbeat."""

    def free(self) -> None:
        """Free it. Collective. A second call does nothing.

        If an exception, such as a timeout, has ended the first one, it does the rest.
        """
        self._free_once()
        shutdown.forget(self._free_once)

    def _free_once(self) -> None:
        if not self._freed:
            self._free_or_leave()
            self._freed = True
        if self._retained is not None:
            Objects.of(self._retained).remove(self)
            self._retained = None

    def _free(self) -> None:
        """Free what it holds. If this raises, the object is still open."""
        raise NotImplementedError

    def _free_or_leave(self) -> None:
        group = self._retained
        if group is None or not group.lost:
            try:
                self._free()
            except LostRankError:
                if group is None:
                    raise
                group.await_loss(f"{self._describe()}: free")
            else:
                return
        self._end_after_loss()

    def _end_after_loss(self) -> None:
        """Do what `_free` does for others, without MPI's collective calls."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: a copy would be known to this rank only."""
        saved = "; snapshot() returns what can be saved"
        raise TypeError(
            f"{self._describe()} cannot be copied or pickled, because "
            f"all ranks share it"
            f"{saved * hasattr(self, 'snapshot')}"
        )

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free it. After an exception leave it open: other ranks may not free it."""
        if error[0] is None:
            self.free()


class Objects:
    """The objects on one group, and its heartbeat: until the last of them is freed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        # Those that are not freed.
        self._open: list[Freeable] = []
        self._heartbeat: Heartbeat | None = None
        # Whether the user has freed the communicator.
        self._closed = False

    @classmethod
    def of(cls, group: Group) -> Objects:
        """Return those of a group."""
        if _NAME not in group.named:
            group.named[_NAME] = cls(group)
        return cast(Objects, group.named[_NAME])

    def watch(self) -> None:
        """Start the heartbeat, unless there is one. Collective."""
        if self._heartbeat is None and self._group.size > 1:
            self._heartbeat = Heartbeat(self._group, self._place, self._lose)
            self._group.at_close(self._end_watch)

    def _end_watch(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
            self._group.forget(self._end_watch)

    def add(self, made: Freeable) -> None:
        """Keep the group, also if the user frees the communicator. Collective."""
        self.watch()
        self._open.append(made)

    def remove(self, freed: Freeable) -> None:
        """End an `add`. Collective. After an exception it can be called again."""
        if self._open == [freed]:
            self._end_watch()
        # An earlier call may have timed out.
        if freed in self._open:
            self._open.remove(freed)
        self._free_if_unused()

    def close(self) -> None:
        """Free the group after the last `remove`; the communicator is freed."""
        self._closed = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        # After a loss the communicators are kept, which cannot be freed.
        if self._closed and not self._open and not self._group.lost:
            self._group.free()

    def _place(self) -> str:
        """Return where this rank is, for messages; any thread may call it."""
        steps = [each.place() for each in list(self._open)]
        wait = current_wait(threading.main_thread().ident)
        state = f"waiting in {wait.what}" if wait else "computing or in MPI"
        return ", ".join([*filter(None, steps), state])

    def _lose(self, found: dict[int, str]) -> None:
        """Note that ranks are lost; called by the thread of the heartbeat."""
        group, objects = self._group, list(self._open)
        seen = group.mates & found.keys()
        group.dead |= {r for r in seen if not group.facts[r].process.exists()}
        with group.control.lock:
            group.lost |= found
        shutdown.note_loss()
        for rank, text in found.items():
            # Rank 0 decides about the others, and leads their exchanges.
            needed = rank in (0, group.rank)
            if needed or any(each.needs(rank) for each in objects):
                shutdown.end_process_soon(text)
        # Any output would make that launcher end the job.
        if group.rank == 0 and not ends_job_at_output():
            present = group.size - len(group.lost)
            for text in found.values():
                logger.warning("%s; %d of %d ranks go on", text, present, group.size)
        for each in objects:
            for rank in found:
                each.lose(rank)
        if seconds_waiting() > _BLOCKED:
            shutdown.end_process(next(iter(group.lost.values())))


# Groups

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
            shutdown.abort_because(str(error))

    watching = threading.Thread(target=watch, daemon=True, name=what)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()

"""A private communicator, with collectives that name the ranks they wait for.

`Group.of` returns one `Group` for each communicator of the user; all objects that are
made on that communicator share it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcaccum.deadline import Deadline, current_wait
from hpcaccum.errors import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    LostRankError,
    echo,
    format_ranks,
)
from hpcaccum.mpi.blocking import limited
from hpcaccum.mpi.control import ControlChannel
from hpcaccum.mpi.creation import (
    alone,
    creating,
    seconds_waiting,
    split,
    split_by_node,
)
from hpcaccum.mpi.heartbeat import Facts, Heartbeat, mates
from hpcaccum.mpi.kept_windows import KeptWindows
from hpcaccum.mpi.launcher import ends_job_at_output
from hpcaccum.mpi.progress import Progress
from hpcaccum.mpi.runtime import MPI, check_running
from hpcaccum.mpi.shutdown import (
    end_process,
    end_process_soon,
    is_ending,
    note_loss,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi.lifetime import Freeable

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")

# Seconds after which a call of MPI for all ranks waits for one that is lost.
_BLOCKED = 1.0
_FIRST_USE = "first use of a communicator"
_UNREACHED = (
    "MPI to connect this rank to others: can all nodes reach each other? If an "
    "interface joins only some of them, name another one (Open MPI: "
    "OMPI_MCA_btl_tcp_if_include)"
)


# Held while the keyval is made: threads must not make two.
_making = threading.Lock()


def _keyval() -> int:
    with _making:
        return _made_keyval()


@functools.cache
def _made_keyval() -> int:
    # MPI calls `close` when the user's communicator is freed.
    return int(
        MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, group: group.close())
    )


class Group:
    """A private duplicate of a communicator, and what its ranks share. Collective.

    Args:
        comm: The duplicate, which the group frees.
        node: The part of it that shares memory with this rank, which the group frees;
            None to ask MPI.

    Attributes:
        comm: The private communicator, so that messages of the user and of hpcaccum
            are never confused.
        rank: Rank of this process.
        size: Number of ranks.
        node: Communicator of the ranks that share memory with this one.
        nodes: The ranks of each node, ordered by first rank.
        node_of: For each rank, the place of its node in `nodes`.
        node_number, node_ranks: That of this rank's node, and the ranks of this node.
        single_node: Whether all ranks share memory.
        own_cores: This rank's share of the cores of its node, at least 1. Ranks that
            may run on the same cores share them evenly.
        least_cores: The smallest share of any rank of the group.
        order: Sorts communicators alike on all their ranks, the newest last. Parts of
            a group have its order.
        named: Objects that several users of the group share, by name.
        windows: Those of which objects have words.
        control: The exchanges of small objects, and the order of collective calls.
        broadcasts: Complete broadcasts of this rank with `comm`. MPI pairs them by
            their order, so before the next one this must be the same on all ranks.
        lost: The ranks that are lost, each with why. From the first one on, collective
            calls of MPI must not be made.
    """

    def __init__(
        self, comm: mpi4py_MPI.Intracomm, node: mpi4py_MPI.Intracomm | None = None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.node = node or split_by_node(comm)
        self.named: dict[str, Any] = {}
        self.windows = KeptWindows()
        # Not at their first use, which may be on some ranks only.
        self.own_cores = self._share_cores()
        self.nodes, self.least_cores = self._find_nodes()
        numbers = {r: number for number, ranks in enumerate(self.nodes) for r in ranks}
        self.node_of = [numbers[rank] for rank in range(self.size)]
        self.node_number = self.node_of[self.rank]
        self.node_ranks = self.nodes[self.node_number]
        self.single_node = len(self.nodes) == 1
        self.lost: dict[int, str] = {}
        self.control = ControlChannel(comm, self.lost)
        self.broadcasts = 0
        self._numbers = itertools.count(1)
        # The objects made with it, which are not freed.
        self._objects: list[Freeable] = []
        self._heartbeat: Heartbeat | None = None
        self._closed = False
        self._inside: Group | None = None
        # Until the first object is made.
        self._start: Heartbeat | None = None
        self._facts, self.order = self._find_facts()
        # Now: a rank that dies while others make an object must be known to them.
        self._mates = mates(self._facts, self.rank)

    def _find_nodes(self) -> tuple[list[list[int]], int]:
        """Return the ranks of each node, and the least share of cores."""
        found = self.comm.allgather((self.node.bcast(self.rank), self.own_cores))
        nodes: dict[int, list[int]] = {}
        for rank, (first, _) in enumerate(found):
            nodes.setdefault(first, []).append(rank)
        return list(nodes.values()), min(cores for _, cores in found)

    def _find_facts(self) -> tuple[list[Facts], tuple[int, str]]:
        """Return what the heartbeat needs to know of each rank, and rank 0's order."""
        failure = facts = None
        order = time.time_ns(), secrets.token_hex(8)
        try:
            facts = Facts.own()
        except InvalidArgumentError as error:
            failure = error
        try:
            found = self.raise_together("heartbeat", failure, (facts, order))
        except InvalidArgumentError:
            self.free()
            raise
        return [facts for facts, _ in found], found[0][1]

    def _share_cores(self) -> int:
        mine = os.sched_getaffinity(0)
        sharing = [cores for cores in self.node.allgather(mine) if cores & mine]
        return max(1, len(mine) // len(sharing))

    @classmethod
    def of(cls, comm: mpi4py_MPI.Comm | Group | None = None) -> Group:
        """Return the group of a communicator; make it at the first call. Collective.

        Args:
            comm: An intracommunicator, or None for COMM_WORLD. A `Group` is returned
                unchanged.

        Raises:
            TypeError: If ``comm`` is something else.
            FreedError: After MPI.Finalize().
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if not all ranks make the
                first call.
            InvalidArgumentError: On every rank, if HPCACCUM_HEARTBEAT or
                HPCACCUM_ON_LOSS is invalid on one.
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
            group = limited(
                lambda: cls(duplicate)._prepare_sums(comm), _FIRST_USE, _UNREACHED
            )
            comm.Set_attr(_keyval(), group)
            group._watch_start()
        return cast(Group, group)

    def __repr__(self) -> str:
        """Show the numbers."""
        if MPI.Is_finalized():
            return f"Group(rank {self.rank} of {self.size}, finalized)"
        return f"Group(rank {self.rank} of {self.size}, {self.node.size} on its node)"

    def _prepare_sums(self, comm: mpi4py_MPI.Intracomm) -> Group:
        """Make the first sum of objects, which the user may make later on. Collective.

        The first one on a communicator stops all threads of a rank, a server among
        them, until all ranks have called it: mpi4py duplicates the communicator then,
        and holds the interpreter lock. If other threads did that on another
        communicator meanwhile, ranks would wait for each other without end.
        """
        main = threading.current_thread() is threading.main_thread()
        all_main = all(self.comm.allgather(main))
        with alone(self.comm, _FIRST_USE, _UNREACHED):
            comm.allreduce(0)
            # Another thread may be in a call on that one.
            if all_main and self.size == MPI.COMM_WORLD.size:
                MPI.COMM_WORLD.allreduce(0)
        return self

    @functools.cached_property
    def progress(self) -> Progress:
        """What the agent of this rank's node watches."""
        return Progress()

    @property
    def inside(self) -> Group:
        """The group of the ranks of this node. Collective at first use."""
        # No cached property: before Python 3.12, all groups share the lock of one.
        if self._inside is None:
            self._inside = self.split(self.nodes)
        return self._inside

    def meet(self, value: T, what: str) -> dict[int, T]:
        """Return the values of all ranks that are not lost, by rank. Collective.

        For calls after a loss, of which all these ranks know.

        Raises:
            DisagreementError, WaitTimeoutError: As `allgather` does.
        """
        return self.control.gather_rest(value, what)

    def gather_present(self, value: T, what: str) -> dict[int, T]:
        """Return the values of all ranks that are not lost, by rank. Collective.

        Raises:
            DisagreementError, WaitTimeoutError: As `allgather` does.
        """
        with contextlib.suppress(LostRankError):
            return dict(enumerate(self.allgather(value, what)))
        # Rank 0 has told this call of a loss; its heartbeat tells this rank, too.
        Deadline(None, what).wait(lambda: self.lost or None, lambda: "the heartbeat")
        return self.meet(value, what)

    def allgather(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order. Collective.

        Unlike MPI's allgather it names the ranks that it waits for, and ranks that make
        different calls get an error.

        Args:
            value: Any object that can be pickled, of this rank.
            what: Name of the call; the same on all ranks.

        Raises:
            DisagreementError: On every rank that waits, if ranks make different calls.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if a rank is missing.
            LostRankError: If a rank is lost.
        """
        check_running(MPI)
        return self.control.gather(value, what)

    def agree(
        self,
        what: str,
        check: Callable[[], T],
        facts: Callable[[T], Mapping[str, object]] | None = None,
        call: str | None = None,
    ) -> T:
        """Check this rank's arguments, and that all ranks pass the same. Collective.

        Args:
            what: The object or call that they are for; begins the messages.
            check: Checks this rank's arguments and returns them, or raises an error.
            facts: Selects from them what must be the same on all ranks, by name. Values
                are compared by their ``repr``. The default is everything: the items of
                a mapping, or the attributes of another object.
            call: Name of the call, the same on all ranks. The default is ``what``.

        Returns:
            What ``check`` returned on this rank.

        Raises:
            DisagreementError: On every rank, if a fact differs.
            Exception: On every rank, if ``check`` raised an error on one; see
                `raise_together`.
        """
        try:
            checked = check()
            found = (facts or _items)(checked)
            report = {name: repr(fact) for name, fact in found.items()}
        except Exception as error:
            self.raise_together(what, error, call=call)
            raise
        reports = self.raise_together(what, None, (report, self._taken()), call)
        self._check_windows([taken for _, taken in reports])
        self.compare(what, [each for each, _ in reports])
        return checked

    def raise_together(
        self,
        what: str,
        failure: Exception | None,
        value: Any = None,
        call: str | None = None,
    ) -> list[Any]:
        """Raise on every rank if one has failed; else return all values. Collective.

        Args:
            what: Begins the messages.
            failure: The error of this rank, or None.
            value: The value of this rank.
            call: Name of the call, the same on all ranks. The default is ``what``.

        Raises:
            Exception: ``failure`` on a rank that has one. On the others an error that
                names a rank that failed, of the same type if that is an argument or
                device error of hpcaccum or a TypeError, else a RuntimeError.
        """
        reports = self.allgather((_portable(failure), value), call or what)
        found = ((rank, error) for rank, (error, _) in enumerate(reports) if error)
        if (first := next(found, None)) is None:
            return [each for _, each in reports]
        rank, (kind, text) = first
        if failure is None:
            raise echo(kind(f"{what}: {_of_rank(rank, _rest(text, what))}"))
        again = rank < self.rank and _portable(failure) == (kind, text)
        raise echo(failure) if again else failure

    def compare(self, what: str, reports: Sequence[Mapping[str, str]]) -> None:
        """Raise DisagreementError unless the reports of all ranks are the same.

        Args:
            what: Begins the message.
            reports: Facts by name, of each rank; the same list on all ranks.
        """
        for name in {name: None for report in reports for name in report}:
            values = [report.get(name, "nothing") for report in reports]
            others = [r for r, value in enumerate(values) if value != values[0]]
            if others:
                error = DisagreementError(
                    f"{what}: {name} must be the same on all {self.size} ranks: rank 0 "
                    f"has {values[0]}, rank {others[0]} has {values[others[0]]} "
                    f"({format_ranks(others)} unlike rank 0)"
                )
                raise echo(error) if self.rank > 0 else error

    def split(self, shards: Sequence[Sequence[int]]) -> Group:
        """Return the group of the ranks that are in one list with this. Collective.

        Args:
            shards: Lists of ranks, which contain each rank once. The order in a list is
                the order of the ranks in the new group.
        """
        color = next(c for c, ranks in enumerate(shards) if self.rank in ranks)
        key = list(shards[color]).index(self.rank)
        part = Group(split(self.comm, color, key))
        part.order = self.order
        return part

    def label(self, what: str) -> str:
        """Return a name with a number that no other object of this group has.

        It is the same on all ranks if they make objects in the same order.
        """
        return f"{what} (number {next(self._numbers)})"

    def retain(self, made: Freeable) -> None:
        """Keep the private communicators, also if the user frees the original.

        Collective. The first object starts the heartbeat, the last one stops it.
        """
        if self._heartbeat is None and self.size > 1:
            self._end_start()
            self._heartbeat = self._new_heartbeat()
        self._objects.append(made)

    def _watch_start(self) -> None:
        """Look at the processes of this host while the first object is made."""
        if self.size > 1:
            self._start = self._new_heartbeat(alone=True)

    def _new_heartbeat(self, *, alone: bool = False) -> Heartbeat:
        return Heartbeat(
            self, self._facts, self._mates, self._place, self._lose, alone=alone
        )

    def _end_start(self) -> None:
        if self._start is not None:
            self._start.over = True

    def release(self, freed: Freeable) -> None:
        """End a `retain`. Collective. After an exception it can be called again.

        After a loss the communicators are kept, which cannot be freed.
        """
        if self._heartbeat is not None and self._objects == [freed]:
            self._heartbeat.stop()
            self._heartbeat = None
        # An earlier call may have timed out.
        if freed in self._objects:
            self._objects.remove(freed)
        self._free_if_unused()

    def lost_with(self, ranks: Collection[int]) -> set[int]:
        """Return the ranks of nodes whose agents are threads of some ranks."""
        gone: set[int] = set()
        if "agent" in self.named:
            for node in self.nodes:
                if node[0] in ranks:
                    gone.update(node)
        return gone

    def _lose(self, found: dict[int, str]) -> None:
        """Note that ranks are lost; called by the thread of the heartbeat."""
        with self.control.lock:
            self.lost |= found
        note_loss()
        for rank, text in found.items():
            # Rank 0 decides about the others, and leads their exchanges.
            needed = rank in (0, self.rank)
            if needed or any(each.needs(rank) for each in list(self._objects)):
                end_process_soon(text)
        # Any output would make that launcher end the job.
        if self.rank == 0 and not ends_job_at_output():
            present = self.size - len(self.lost)
            for text in found.values():
                logger.warning("%s; %d of %d ranks go on", text, present, self.size)
        for each in list(self._objects):
            for rank in found:
                each.lose(rank)
        if seconds_waiting() > _BLOCKED:
            end_process(next(iter(self.lost.values())))

    def _taken(self) -> list[dict[int, int]]:
        """Return how many words are taken: of this group's windows, of its node's."""
        return [windows.taken() for windows in self._all_windows()]

    def _check_windows(self, taken: Sequence[list[dict[int, int]]]) -> None:
        """Take no more words of windows about which ranks disagree.

        Args:
            taken: What `_taken` returned on each rank.
        """
        on_node = [taken[rank][1:] for rank in self.node_ranks]
        self.windows.compare([each[0] for each in taken])
        for inside in self._all_windows()[1:]:
            inside.compare([words[0] if words else {} for words in on_node])

    def _all_windows(self) -> list[KeptWindows]:
        groups = [self] if self._inside is None else [self, self._inside]
        return [group.windows for group in groups]

    def _place(self) -> str:
        """Return where this rank is, for messages; any thread may call it."""
        steps = [each.place() for each in list(self._objects)]
        wait = current_wait(threading.main_thread().ident)
        state = f"waiting in {wait.what}" if wait else "computing or in MPI"
        return ", ".join([*filter(None, steps), state])

    def close(self) -> None:
        """Free the private communicators, after the last `release`."""
        self._closed = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._closed and not self._objects and not self.lost:
            self.free()

    def free(self) -> None:
        """Free the private communicators, once. Collective."""
        if self.comm == MPI.COMM_NULL:
            return
        self._end_start()
        self.windows.free()
        if self._inside is not None:
            self._inside.free()
        if not is_ending():
            self.control.drain()
        self.node.Free()
        self.comm.Free()


def _items(value: Any) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else vars(value)


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error as a type that can be pickled, and its message."""
    if error is None:
        return None
    known = (InvalidArgumentError, TypeError, DeviceUnavailableError)
    kind = type(error) if isinstance(error, known) else RuntimeError
    return kind, str(error)


def _rest(text: str, what: str) -> str:
    """Return a message without the parts with which ``what`` begins, too.

    An error that may also be raised on one rank alone begins with the name of its
    object already.
    """
    for part in what.split(": "):
        if not text.startswith(f"{part}: "):
            break
        text = text.removeprefix(f"{part}: ")
    return text


def _of_rank(rank: int, text: str) -> str:
    """Return the message of a rank, which begins with the rank."""
    return text if text.startswith(f"rank {rank} ") else f"rank {rank}: {text}"


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

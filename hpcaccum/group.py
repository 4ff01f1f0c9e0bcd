"""Ranks that work together: a private communicator, and meetings that cannot hang.

`Group.of` gives one `Group` for each communicator of the user; everything built on
that communicator shares it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcaccum import mpi
from hpcaccum.deadline import Deadline
from hpcaccum.errors import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
)
from hpcaccum.meeting import Meetings
from hpcaccum.meeting import ranks_text as ranks_text
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")


@functools.cache
def _keyval() -> int:
    # The private duplicate lives as long as the user's communicator does.
    return int(
        MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, group: group.abandon())
    )


class Group:
    """A private duplicate of a communicator, and what belongs to its ranks.

    Attributes:
        comm: The private communicator: no message of the user's can be mistaken for
            one of ours.
        rank, size: This process in it, and how many there are.
        node: Communicator of the ranks that share memory with this one.
        shared: Objects that several users of the group hold together, by name.
        meetings: The group's exchanges of small objects, and its order of calls.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self.shared: dict[str, Any] = {}
        # The first sum of objects stops all threads of a rank until the others come,
        # a server among them, so it happens here. Source: mpi4py duplicates a
        # communicator for its sums of objects, and holds the interpreter lock.
        comm.allreduce(0)
        self.node.allreduce(0)
        self.meetings = Meetings(comm)
        self._numbers = itertools.count(1)
        self._users, self._abandoned = 0, False

    @classmethod
    def of(cls, comm: mpi4py_MPI.Comm | Group | None = None) -> Group:
        """Return the group of a communicator, made at the first call. Collective.

        Args:
            comm: An intracommunicator, or None for COMM_WORLD; a `Group` is returned
                as it is.

        Raises:
            TypeError: If ``comm`` is something else.
            FreedError: After MPI.Finalize().
        """
        mpi.check_running(MPI)
        if isinstance(comm, Group):
            return comm
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise TypeError(f"comm must be an MPI intracommunicator, got {comm!r}")
        group: Any = comm.Get_attr(_keyval())
        if group is None:
            group = cls(_duplicate(comm))
            for each in (comm, MPI.COMM_WORLD):
                # Those that the user's own sums of objects may use.
                if each.size == comm.size:
                    each.allreduce(0)
            comm.Set_attr(_keyval(), group)
        return cast(Group, group)

    def __repr__(self) -> str:
        """Show the numbers."""
        if MPI.Is_finalized():
            return f"Group(rank {self.rank} of {self.size}, finalized)"
        return f"Group(rank {self.rank} of {self.size}, {self.node.size} on its node)"

    @functools.cached_property
    def single_node(self) -> bool:
        """Whether all ranks share memory. Collective at first use."""
        return bool(self.comm.allreduce(self.node.size == self.size, MPI.LAND))

    @functools.cached_property
    def leaders(self) -> mpi4py_MPI.Intracomm | None:
        """The first rank of each node, None on the others. Collective at first use."""
        color = 0 if self.node.rank == 0 else MPI.UNDEFINED
        leaders = self.comm.Split(color, self.rank)
        if leaders == MPI.COMM_NULL:
            return None
        return cast("mpi4py_MPI.Intracomm", leaders)

    def meet(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order. Collective.

        Like MPI's allgather of small objects, but a rank that does not come is named,
        and ranks that make different calls, by ``what``, get an error.

        Raises:
            DisagreementError, WaitTimeoutError: As `Meetings.gather`.
        """
        mpi.check_running(MPI)
        return self.meetings.gather(value, what)

    def agree(
        self,
        what: str,
        facts: Callable[[], Mapping[str, object]],
        call: str | None = None,
    ) -> None:
        """Check that all ranks pass the same arguments. Collective.

        Args:
            what: What is being made; begins the messages.
            call: Names the call, the same on all ranks; ``what`` if that is.
            facts: Checks this rank's arguments and returns those that must be the same
                everywhere; what it raises is raised on every rank.

        Raises:
            DisagreementError: On every rank, if a fact differs.
            Exception: On every rank, what ``facts`` raised on one; other ranks see the
                same type (if it is one of ours or a TypeError) and which rank it was.
        """
        mine: Mapping[str, object] = {}
        failure: Exception | None = None
        try:
            mine = facts()
        except Exception as error:
            failure = error
        report = {name: repr(fact) for name, fact in mine.items()}
        reports = self.raise_together(what, failure, report, call)
        self.compare(what, reports)

    def raise_together(
        self,
        what: str,
        failure: Exception | None,
        value: Any = None,
        call: str | None = None,
    ) -> list[Any]:
        """Raise on every rank what failed on one; else return all values. Collective.

        A rank that did not fail itself raises an error of the same type, if it is one
        of ours or a TypeError, that says which rank failed.
        """
        reports = self.meet((_portable(failure), value), call or what)
        if failure is not None:
            raise failure
        for rank, (error, _) in enumerate(reports):
            if error is not None:
                raise error[0](f"{what}: rank {rank}: {error[1]}")
        return [each for _, each in reports]

    def compare(self, what: str, reports: Sequence[Mapping[str, str]]) -> None:
        """Raise DisagreementError unless what the ranks report is the same."""
        for name in {name: None for report in reports for name in report}:
            values = [report.get(name, "nothing") for report in reports]
            others = [r for r, value in enumerate(values) if value != values[0]]
            if others:
                raise DisagreementError(
                    f"{what}: {name} must be the same on all {self.size} ranks: rank 0 "
                    f"has {values[0]}, rank {others[0]} has {values[others[0]]} "
                    f"({ranks_text(others)} unlike rank 0)"
                )

    def split(self, shards: Sequence[Sequence[int]]) -> Group:
        """Return the group of those ranks that are in one list with this. Collective.

        Args:
            shards: Lists of ranks; together they name each rank once. The order inside
                a list is the order of the ranks in the new group.
        """
        color = next(c for c, ranks in enumerate(shards) if self.rank in ranks)
        key = list(shards[color]).index(self.rank)
        return Group(cast("mpi4py_MPI.Intracomm", self.comm.Split(color, key)))

    def next_number(self) -> int:
        """Return a number that tells objects of one name apart, alike on all ranks."""
        return next(self._numbers)

    def use(self) -> None:
        """Keep the private communicators, whatever becomes of the user's."""
        self._users += 1

    def leave(self) -> None:
        """End one `use`."""
        self._users -= 1
        self._free_if_unused()

    def abandon(self) -> None:
        """The user's communicator goes: free the private ones after the last use."""
        self._abandoned = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._abandoned and self._users == 0:
            self.free()

    def free(self) -> None:
        """Free the private communicators. Collective."""
        if self.__dict__.get("leaders") is not None:
            self.__dict__["leaders"].Free()
        if not mpi.is_ending():
            self.meetings.drain()
        self.node.Free()
        self.comm.Free()


class Opened:
    """Frees something collective once: when asked to, or before MPI_Finalize.

    Args:
        group: Whose communicators are needed until then.
        free: Frees it; if that raises, it is still open.
        what: Its name.

    Attributes:
        label: The name, with a number that is its own.
        closed: Whether it was freed.
    """

    def __init__(self, group: Group, free: Callable[[], None], what: str) -> None:
        self._group, self._free = group, free
        self.label = f"{what} (number {group.next_number()})"
        group.use()
        mpi.at_exit(self._close)
        self.closed = False

    def _close(self) -> None:
        if not self.closed:
            self._free()
            self.closed = True
            self._group.leave()

    def close(self) -> None:
        """Run it, if it did not run yet."""
        self._close()
        mpi.forget(self._close)


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return a type that every rank has, and the message."""
    if error is None:
        return None
    told = (InvalidArgumentError, TypeError, DeviceUnavailableError)
    known = isinstance(error, told)
    return (type(error) if known else RuntimeError, str(error))


def _duplicate(comm: mpi4py_MPI.Intracomm) -> mpi4py_MPI.Intracomm:
    """Duplicate, but do not wait in silence for a rank that never comes."""
    duplicate, request = comm.Idup()
    Deadline(None, "first use of a communicator").wait(
        lambda: request.Test() or None,
        lambda: f"all {comm.size} ranks to use it with hpcaccum",
    )
    return duplicate

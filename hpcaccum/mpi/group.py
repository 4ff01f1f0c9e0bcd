"""Ranks that work together: a private communicator, and meetings that cannot hang.

`Group.of` gives one `Group` for each communicator of the user; everything built on
that communicator shares it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcaccum.deadline import Deadline
from hpcaccum.errors import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    format_ranks,
)
from hpcaccum.mpi.agent import ProgressThread
from hpcaccum.mpi.control import ControlChannel
from hpcaccum.mpi.runtime import MPI, check_running
from hpcaccum.mpi.shutdown import is_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")


@functools.cache
def _keyval() -> int:
    # The private duplicate lives as long as the user's communicator does.
    return int(
        MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, group: group.close())
    )


class Group:
    """A private duplicate of a communicator, and what belongs to its ranks.

    Attributes:
        comm: The private communicator: no message of the user's can be mistaken for
            one of ours.
        rank, size: This process in it, and how many there are.
        node: Communicator of the ranks that share memory with this one.
        shared: Objects that several users of the group hold together, by name.
        control: The group's exchanges of small objects, and its order of calls.
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
        self.control = ControlChannel(comm)
        self._numbers = itertools.count(1)
        self._retained, self._closed = 0, False

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
        check_running(MPI)
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
    def own_cores(self) -> int:
        """How many cores this rank has for itself, at least 1. Collective at first use.

        Cores that several ranks of a node may run on are shared evenly.
        """
        mine = os.sched_getaffinity(0)
        sharing = [cores for cores in self.node.allgather(mine) if cores & mine]
        return max(1, len(mine) // len(sharing))

    @functools.cached_property
    def progress(self) -> ProgressThread:
        """What lets MPI serve other nodes while this rank computes."""
        return ProgressThread(self.comm, needed=not self.single_node)

    @functools.cached_property
    def leaders(self) -> mpi4py_MPI.Intracomm | None:
        """The first rank of each node, None on the others. Collective at first use."""
        color = 0 if self.node.rank == 0 else MPI.UNDEFINED
        leaders = self.comm.Split(color, self.rank)
        if leaders == MPI.COMM_NULL:
            return None
        return cast("mpi4py_MPI.Intracomm", leaders)

    def allgather(self, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order. Collective.

        Like MPI's allgather of small objects, but a rank that does not come is named,
        and ranks that make different calls, by ``what``, get an error.

        Raises:
            DisagreementError, WaitTimeoutError: As `ControlChannel.gather`.
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
            what: What is being made; begins the messages.
            check: Checks this rank's arguments and returns them; what it raises is
                raised on every rank.
            facts: Selects what must be the same on all ranks, compared by its ``repr``.
                By default all of it: the items of a mapping, else the attributes.
            call: Names the call, the same on all ranks; ``what`` if that is.

        Returns:
            What ``check`` returned on this rank.

        Raises:
            DisagreementError: On every rank, if a fact differs.
            Exception: On every rank, what ``check`` raised on one; other ranks see the
                same type (if it is one of ours or a TypeError) and which rank it was.
        """
        checked: list[T] = []
        report: dict[str, str] = {}
        failure: Exception | None = None
        try:
            checked.append(check())
            found = (facts or _items)(checked[0])
            report = {name: repr(fact) for name, fact in found.items()}
        except Exception as error:
            failure = error
        self.compare(what, self.raise_together(what, failure, report, call))
        return checked[0]

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
        reports = self.allgather((_portable(failure), value), call or what)
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
                    f"({format_ranks(others)} unlike rank 0)"
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

    def retain(self) -> None:
        """Keep the private communicators, whatever becomes of the user's."""
        self._retained += 1

    def release(self) -> None:
        """End one `retain`."""
        self._retained -= 1
        self._free_if_unused()

    def close(self) -> None:
        """The user's communicator goes: free the private ones after the last use."""
        self._closed = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._closed and self._retained == 0:
            self.free()

    def free(self) -> None:
        """Free the private communicators. Collective."""
        if self.__dict__.get("leaders") is not None:
            self.__dict__["leaders"].Free()
        if not is_ending():
            self.control.drain()
        self.node.Free()
        self.comm.Free()


def _items(value: Any) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else vars(value)


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

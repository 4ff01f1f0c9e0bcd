"""A private communicator, with collectives that name the ranks they wait for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hpcaccum.deadline import Deadline
from hpcaccum.errors import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    LostRankError,
    echo,
    format_ranks,
)
from hpcaccum.mpi.job.process import Facts, mates
from hpcaccum.mpi.job.runtime import MPI, check_running
from hpcaccum.mpi.job.shutdown import at_end, forget, is_ending
from hpcaccum.mpi.talk.control import ControlChannel
from hpcaccum.mpi.talk.creation import split, split_by_node
from hpcaccum.mpi.talk.progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

T = TypeVar("T")


class Group:
    """A private duplicate of a communicator, and what its ranks share. Collective.

    Args:
        comm: The duplicate, which the group frees.
        node: The part of it that shares memory with this rank, which the group frees;
            None to ask MPI.

    Attributes:
        comm: The private communicator, so that messages of the user and of hpcaccum
            are never confused.
        rank, size: Rank of this process; number of ranks.
        node: Communicator of the ranks that share memory with this one.
        nodes, node_of: The ranks of each node, ordered by first rank; and for each
            rank, the place of its node there.
        node_number, node_ranks: The place of this rank's node, and its ranks.
        single_node: Whether all ranks share memory.
        own_cores, least_cores: This rank's share of the cores of its node, at least 1,
            and the smallest of any rank. Ranks that may run on the same cores share
            them evenly.
        order: Sorts communicators alike on all their ranks, the newest last. Parts of
            a group have its order.
        named: Objects that several users of the group share, by name.
        words: Windows of which objects take words, by the rank with the memory.
        control: The exchanges of small objects, and the order of collective calls.
        broadcasts: Complete broadcasts of this rank with `comm`. MPI pairs them by
            their order, so before the next one this must be the same on all ranks.
        facts, mates: What must be known of each rank's process; the other ranks of
            this host whose processes this one can see.
        lost: The ranks that are lost, each with why. From the first one on, collective
            calls of MPI must not be made.
        dead: Those of them whose processes have ended, as this rank has seen. They
            write to no memory any more.
    """

    def __init__(
        self, comm: mpi4py_MPI.Intracomm, node: mpi4py_MPI.Intracomm | None = None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.node = node or split_by_node(comm)
        self.named: dict[str, Any] = {}
        self.words: dict[int, Any] = {}
        self._closers: list[Callable[[], None]] = []
        # Not at their first use, which may be on some ranks only.
        self.own_cores = self._share_cores()
        self.nodes, self.least_cores = self._find_nodes()
        numbers = {r: number for number, ranks in enumerate(self.nodes) for r in ranks}
        self.node_of = [numbers[rank] for rank in range(self.size)]
        self.node_number = self.node_of[self.rank]
        self.node_ranks = self.nodes[self.node_number]
        self.single_node = len(self.nodes) == 1
        self.lost: dict[int, str] = {}
        self.dead: frozenset[int] = frozenset()
        self.control = ControlChannel(comm, self.lost)
        self.broadcasts = 0
        self._numbers = itertools.count(1)
        self._inside: Group | None = None
        self.facts, self.order = self._find_facts()
        # Now: a rank that dies while others make an object must be known to them.
        self.mates = mates(self.facts, self.rank)

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
        order = time.time_ns(), os.urandom(8).hex()
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

    def __repr__(self) -> str:
        """Show the numbers."""
        if MPI.Is_finalized():
            return f"Group(rank {self.rank} of {self.size}, finalized)"
        return f"Group(rank {self.rank} of {self.size}, {self.node.size} on its node)"

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

    @property
    def sees_all(self) -> bool:
        """Whether this rank sees whether the processes of all others exist."""
        return len(self.mates) == self.size - 1

    def gather_present(self, value: T, what: str) -> dict[int, T]:
        """Return the values of all ranks that are not lost, by rank. Collective."""
        with contextlib.suppress(LostRankError):
            return dict(enumerate(self.allgather(value, what)))
        self.await_loss(what)
        return self.control.gather_rest(value, what)

    def await_loss(self, what: str) -> None:
        """Wait until the heartbeat tells of a loss, of which rank 0 has told a call."""
        Deadline(None, what).wait(lambda: self.lost or None, lambda: "the heartbeat")

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
            found: Any = checked if facts is None else facts(checked)
            if not isinstance(found, Mapping):
                found = vars(found)
            report = {name: repr(fact) for name, fact in found.items()}
        except Exception as error:
            self.raise_together(what, error, call=call)
            raise
        reports = self.raise_together(what, None, (report, self._words_taken()), call)
        self._compare_words([taken for _, taken in reports])
        self.compare(what, dict(enumerate(each for each, _ in reports)))
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
        self._raise_first(what, failure, dict(enumerate(reports)))
        return [each for _, each in reports]

    def raise_present(
        self, what: str, failure: Exception | None, value: T
    ) -> dict[int, T]:
        """Do as `raise_together` without ranks that are lost; return values by rank."""
        reports = self.gather_present((_portable(failure), value), what)
        self._raise_first(what, failure, reports)
        return {rank: each for rank, (_, each) in reports.items()}

    def _raise_first(
        self, what: str, failure: Exception | None, reports: Mapping[int, Any]
    ) -> None:
        found = ((rank, error) for rank, (error, _) in reports.items() if error)
        if (first := next(found, None)) is None:
            return
        rank, (kind, text) = first
        if failure is None:
            text = _rest(text, what)
            whose = "" if text.startswith(f"rank {rank} ") else f"rank {rank}: "
            raise echo(kind(f"{what}: {whose}{text}"))
        again = rank < self.rank and _portable(failure) == (kind, text)
        raise echo(failure) if again else failure

    def compare(self, what: str, reports: Mapping[int, Mapping[str, str]]) -> None:
        """Raise DisagreementError unless the facts of all ranks, by name, are the same.

        ``reports`` is the same on all ranks.
        """
        for name in {name: None for report in reports.values() for name in report}:
            values = {r: report.get(name, "nothing") for r, report in reports.items()}
            others = [r for r, value in values.items() if value != values[0]]
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

        Raises:
            LostRankError: If a rank is lost.
        """
        self.control.check_all_present("a new group")
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

    def _words_taken(self) -> list[dict[int, int]]:
        """Return how many words are taken by root, of this group and of `inside`."""
        return [
            {root: window.taken for root, window in group.words.items()}
            for group in self._with_inside()
        ]

    def _compare_words(self, taken: Sequence[list[dict[int, int]]]) -> None:
        """Take no more words of windows if ranks have taken different ones.

        A constructor that has timed out on some ranks leaves such ranks.
        """
        for level, group in enumerate(self._with_inside()):
            ranks = self.node_ranks if level else range(self.size)
            # A rank that has made no `inside` has taken none there.
            found = [[*taken[rank], {}][level] for rank in ranks]
            if any(each != found[0] for each in found):
                group.words.clear()

    def _with_inside(self) -> list[Group]:
        return [self] if self._inside is None else [self, self._inside]

    def at_close(self, close: Callable[[], None]) -> None:
        """Have ``close`` called before the communicators are freed, or at the end.

        Last registered first. It calls `forget`.
        """
        if not self._closers:
            at_end(self._close, self.order)
        self._closers.append(close)

    def forget(self, close: Callable[[], None]) -> None:
        """Undo an `at_close`."""
        self._closers.remove(close)
        if not self._closers:
            forget(self._close)

    def _close(self) -> None:
        while self._closers:
            self._closers[-1]()

    def free(self) -> None:
        """Free the private communicators, once. Collective."""
        if self.comm == MPI.COMM_NULL:
            return
        self._close()
        if self._inside is not None:
            self._inside.free()
        if not is_ending():
            self.control.mailbox.drain()
        self.node.Free()
        self.comm.Free()


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Return an error as a type that can be pickled, and its message."""
    if error is None:
        return None
    known = (InvalidArgumentError, TypeError, DeviceUnavailableError)
    kind = type(error) if isinstance(error, known) else RuntimeError
    return kind, str(error)


def _rest(text: str, what: str) -> str:
    """Return a message without the parts with which ``what`` begins, too."""
    # An error that may also be raised on one rank alone begins with the name of its
    # object already.
    for part in what.split(": "):
        if not text.startswith(f"{part}: "):
            break
        text = text.removeprefix(f"{part}: ")
    return text

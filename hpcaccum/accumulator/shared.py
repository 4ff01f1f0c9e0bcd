"""An accumulator that all ranks share, behind the handles that users have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

from hpcaccum.accumulator.host_calls import FarTake, HostCalls
from hpcaccum.accumulator.protocol import AdmissionProtocol
from hpcaccum.accumulator.receipts import Tally
from hpcaccum.accumulator.settings import SUM, Settings
from hpcaccum.accumulator.state import Closed
from hpcaccum.accumulator.storage import make_storage
from hpcaccum.accumulator.take import Take
from hpcaccum.accumulator.turns import OneThread
from hpcaccum.accumulator.writer import Writer
from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError, LostRankError, WaitTimeoutError
from hpcaccum.mpi import Freeable, Group, is_ending

# Begins the key of one with a shared name in `Group.named`.
_KEY = "accumulator"


class SharedAccumulator(Freeable):
    """The accumulator behind its handles, freed with the last one. Collective.

    Attributes:
        group, settings: The ranks, and the checked arguments.
        protocol: Admits gradients.
        storage: Has them until they are taken.
        writer: This rank's gradients.
        calls: Those of the agent of the host's node, between nodes.
        earlier: The counts of runs that this one continues.
    """

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        self.group, self.settings, self._what = group, settings, what
        self._handles, self._frees = 0, False
        self.earlier: Tally | None = None
        with contextlib.ExitStack() as undo:
            self.protocol = AdmissionProtocol(group, settings, what)
            undo.callback(self.protocol.words.free)
            self.storage = make_storage(group, settings, what)
            undo.pop_all()
        self._taking = OneThread(what)
        self.calls: HostCalls | None = None
        if not group.single_node:
            self.calls = HostCalls(group, self.protocol, self.storage, what)
        self._end_arrivals: Callable[[], None] | None = None
        if self.calls is not None and self.calls.leads and settings.storage == SUM:
            # What ranks of other nodes add moves when MPI is called, little at a time.
            self._end_arrivals = group.progress.expect(self.protocol.is_joined)
        self.writer = Writer(self.protocol, self.storage, group.rank, self.calls, what)
        self._register(group, group.label(what))

    @classmethod
    def attach(cls, group: Group, settings: Settings, what: str) -> SharedAccumulator:
        """Return that of the shared name, or a new one, for a handle. Collective."""
        key = f"{_KEY} {settings.shared_name}"
        shared = cast("SharedAccumulator | None", group.named.get(key))
        if shared is None:
            shared = cls(group, settings, what)
            if settings.shared_name:
                group.named[key] = shared
        elif differences := _differences(shared.settings, settings):
            raise InvalidArgumentError(
                f"accumulator with shared_name {settings.shared_name!r} already exists "
                f"{differences}"
            )
        shared._handles += 1
        return shared

    def detach(self) -> None:
        """Drop one handle; free the accumulator with the last one. Collective."""
        if self._handles == 1:
            self.free()
            self.group.named.pop(f"{_KEY} {self.settings.shared_name}", None)
        self._handles -= 1

    @contextlib.contextmanager
    def hold_round(
        self,
        required: int,
        deadline: Deadline,
        *,
        at_least: int | None = None,
        empty: bool = False,
    ) -> Iterator[Closed]:
        """Close a round of ``required`` gradients or more, and hold it for a block.

        If the block raises, or the admitted writers do not finish in time, the round
        stays on record and the next take resumes it. ``at_least`` gradients suffice
        when the limit passes. A round of which all gradients were lost is held if
        ``empty``, on the host's node; else another is closed at its step.
        """
        take: Take | FarTake
        if self.calls is None or self.calls.near:
            of = self.protocol, self.storage, self.group.rank
            take = Take(*of, required, at_least, empty, self.calls)
        else:
            take = FarTake(self.calls, required, at_least)
        with self._taking.hold("take_grad", deadline):
            try:
                yield take.wait(deadline)
                take.complete()
            finally:
                take.leave()

    def tally(self) -> Tally:
        """Return the counts of all ranks, with those of earlier runs."""
        tally = self.protocol.counters.tally()
        return tally if self.earlier is None else self.earlier + tally

    def _describe(self) -> str:
        return f"accumulator {self._what!r}"

    def _free(self) -> None:
        failure = None
        try:
            # No take must wait for a gradient of this rank, nor for more of one whose
            # program has ended.
            self.writer.finish()
            if is_ending():
                self.leave()
        except WaitTimeoutError as error:
            # Raised by all ranks together, so that they can call it again.
            failure = error
        self.group.raise_together(f"{self.label}: free", failure)
        self._frees = True
        self.writer.free()
        if self.calls is not None:
            self.calls.free()
        if self._end_arrivals is not None:
            self._end_arrivals()
            self._end_arrivals = None
        self.storage.free()
        self.protocol.words.free()

    def needs(self, rank: int) -> bool:
        """Whether a rank has the words; or memory is being freed: MPI waits for it."""
        return rank == self.settings.host or self._frees

    def lose(self, rank: int) -> None:
        """Have takes no longer wait for a rank; apply nothing more on that rank."""
        if self.group.rank == rank:
            self.protocol.membership.end(LostRankError(self.group.lost[rank]))
        elif self.calls is None and self.group.rank == self.settings.host:
            self.protocol.membership.lose_rank(rank)
        elif self.calls is not None and self.calls.leads:
            self.calls.run("lose", rank)

    def _end_after_loss(self) -> None:
        """Wait until all ranks come: they may use what this one has until then."""
        self.leave()
        self.group.gather_present(None, f"{self.label}: free")

    def leave(self) -> None:
        """Promise that this rank contributes no more; does nothing on such a host."""
        all_ranks = self.settings.workers == self.group.size
        if all_ranks or self.group.rank != self.settings.host:
            self.writer.leave()


def _differences(old: Settings, new: Settings) -> str:
    """Return how one accumulator differs from another one, the kind first."""
    if old.is_sparse != new.is_sparse:
        return (
            "and is sparse, not dense" if old.is_sparse else "and is dense, not sparse"
        )
    for field, value in vars(new).items():
        if value != (had := getattr(old, field)):
            return f"with {field} {had}, got {value}"
    return ""

"""The state that all handles of one accumulator share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hpcaccum.accumulator.host_calls import HostCalls
from hpcaccum.accumulator.protocol import AdmissionProtocol
from hpcaccum.accumulator.settings import Settings
from hpcaccum.accumulator.storage import make_storage
from hpcaccum.accumulator.taker import Taker
from hpcaccum.accumulator.writer import Writer
from hpcaccum.errors import InvalidArgumentError, LostRankError, WaitTimeoutError
from hpcaccum.mpi import Freeable, Group, is_ending

if TYPE_CHECKING:
    from hpcaccum.accumulator.receipts import Tally


@dataclass(frozen=True)
class AccumulatorStatistics:
    """The numbers of an accumulator.

    Attributes:
        global_step: The step now.
        num_accumulated: Gradients that no take has returned yet.
        weight: Sum of the weights of those of them that are in place.
        tally: Gradients accepted and dropped so far, by rank, and their lags.
        left: Ranks that have left, or are lost.
        lost: Ranks that are lost: an exception has ended their call.
        num_lost: Gradients that were admitted and are in no result: their ranks were
            lost before these were in place.
        storage: ``"slots"`` or ``"sum"``; ``"rows"`` if it is sparse.
        window_bytes: Bytes of this rank's memory that hold gradients.
    """

    global_step: int
    num_accumulated: int
    weight: float
    tally: Tally
    left: tuple[int, ...]
    lost: tuple[int, ...]
    num_lost: int
    storage: str
    window_bytes: int


class SharedAccumulator(Freeable):
    """The accumulator behind its handles, freed with the last one. Collective.

    Attributes:
        group, settings: The ranks, and the checked arguments.
        protocol: Admits gradients.
        storage: Has them until they are taken.
        writer, taker: This rank's gradients, and takes.
        calls: Those of the agent of the host's node, between nodes.
        take: `Taker.take`, by that agent if the host's node is another.
        earlier: The counts of runs that this one continues.
    """

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        self.group, self.settings, self._what = group, settings, what
        self._handles, self._frees = 0, False
        self.earlier: Tally | None = None
        with contextlib.ExitStack() as undo:
            self.protocol = AdmissionProtocol(group, settings, what)
            undo.callback(self.protocol.free)
            self.storage = make_storage(group, settings, what)
            undo.pop_all()
        self.taker = Taker(self.protocol, self.storage, group.rank, what)
        self.take, self.calls = self.taker.take, None
        if not group.single_node:
            parts = group, self.protocol, self.storage, self.taker, what
            self.calls = self.taker.calls = HostCalls(*parts)
            if not self.calls.near:
                self.take = self.calls.take
        self.writer = Writer(self.protocol, self.storage, group.rank, self.calls, what)
        self._register(group, group.label(what))

    @classmethod
    def attach(cls, group: Group, settings: Settings, what: str) -> SharedAccumulator:
        """Return the accumulator for one more handle. Collective.

        It is the existing one of this shared name, if there is one.
        """
        key = _key(settings)
        shared = cast("SharedAccumulator | None", group.named.get(key))
        if shared is None:
            shared = cls(group, settings, what)
            if settings.shared_name:
                group.named[key] = shared
        shared._check_same(settings)
        shared._handles += 1
        return shared

    def _check_same(self, settings: Settings) -> None:
        kinds = [_kind(each) for each in (self.settings, settings)]
        if kinds[0] != kinds[1]:
            raise InvalidArgumentError(
                f"accumulator with shared_name {settings.shared_name!r} already exists "
                f"and is {kinds[0]}, not {kinds[1]}"
            )
        for field, value in vars(settings).items():
            old = getattr(self.settings, field)
            if old != value:
                raise InvalidArgumentError(
                    f"accumulator with shared_name {settings.shared_name!r} already "
                    f"exists with {field} {old}, got {value}"
                )

    def detach(self) -> None:
        """Drop one handle; free the accumulator with the last one. Collective."""
        if self._handles == 1:
            self.free()
            self.group.named.pop(_key(self.settings), None)
        self._handles -= 1

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
        self.storage.free()
        self.protocol.free()

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


def _key(settings: Settings) -> str:
    return f"accumulator {settings.shared_name}"


def _kind(settings: Settings) -> str:
    return "sparse" if settings.is_sparse else "dense"

"""An accumulator, which all ranks share, and the handles that users have."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    SupportsIndex,
    SupportsInt,
    TypeVar,
    cast,
)

from hpcaccum.accumulator.host_calls import FarTake, HostCalls
from hpcaccum.accumulator.protocol import AdmissionProtocol
from hpcaccum.accumulator.receipts import Tally
from hpcaccum.accumulator.settings import Settings
from hpcaccum.accumulator.storage import make_storage
from hpcaccum.accumulator.take import Take
from hpcaccum.accumulator.turns import OneThread
from hpcaccum.accumulator.writer import Writer
from hpcaccum.arguments import positive_count, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import (
    FreedError,
    InvalidArgumentError,
    LostRankError,
    WaitTimeoutError,
)
from hpcaccum.mpi import Freeable, Group, is_ending
from hpcaccum.nodes import LostNodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from hpcaccum.accumulator.state import Closed

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")

# Begins the key of one with a shared name in `Group.named`.
_KEY = "accumulator"


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


@dataclass(frozen=True)
class Taken(Generic[T]):
    """What `take` of an accumulator returns.

    Attributes:
        value: The reduction: what `take_grad` returns.
        count: How many gradients are in it.
        weight: The sum of their weights.
        step: The step at which they were accepted.
    """

    value: T
    count: int
    weight: float
    step: int


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
        self.writer = Writer(self.protocol, self.storage, group.rank, self.calls, what)
        self._register(group, group.label(what))

    @classmethod
    def attach(cls, group: Group, settings: Settings, what: str) -> SharedAccumulator:
        """Return the accumulator for one more handle. Collective.

        It is the existing one of this shared name, if there is one.
        """
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


class Accumulator(Freeable):
    """A handle to a `SharedAccumulator`, which several may share. Collective.

    The base of the accumulators that users make: they apply gradients and take them.
    ``check`` checks the arguments of the subclass.

    Raises:
        InvalidArgumentError, TypeError: On every rank, if ``check`` raises on one.
        DisagreementError: On every rank, if the settings differ.
    """

    _numbers = itertools.count()

    def __init__(self, group: Group, name: str, check: Callable[[], Settings]) -> None:
        kind = type(self).__name__
        settings = group.agree(
            f"{kind} {name!r}",
            check,
            lambda settings: {"name": name, **vars(settings)},
            call=kind,
        )
        self._name, self._number = name, next(self._numbers)
        self._shared = shared = SharedAccumulator.attach(group, settings, name)
        self._settings = shared.settings
        # Gradients are summed in it.
        self._wide = accumulation_dtype(settings.dtype)
        self._protocol, self._storage = shared.protocol, shared.storage

    def __repr__(self) -> str:
        """Show the step and the number of gradients."""
        kind = type(self).__name__
        if self._freed or self._shared.freed:
            return f"<{kind} {self._name!r}, freed>"
        state = self._protocol.state()
        return (
            f"<{kind} {self._name!r} {self.dtype} "
            f"{self._settings.shape}: step {state.step}, {self._protocol.count()} "
            f"accumulated, {self._settings.storage}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of results."""
        return self._settings.dtype

    @property
    def name(self) -> str:
        """The name given at construction."""
        return self._name

    @property
    def accumulator_ref(self) -> str:
        """Text that identifies the object on this rank."""
        shared = self._settings.shared_name
        return f"shared:{shared}" if shared else f"{self._name}:{self._number}"

    @property
    def global_step(self) -> int:
        """The accumulator's step now."""
        self._check_open()
        return self._protocol.state().step

    def _take(
        self,
        num_required: SupportsIndex,
        at_least: SupportsIndex | None,
        timeout: float | None,
        target: Any,
    ) -> Taken[Any]:
        """Take a round; see `_reduce` about ``target``."""
        self._check_open()
        self._check_target(target)
        required = positive_count(num_required, "num_required")
        limit = self._protocol.packing.max_count
        if required > limit:
            raise InvalidArgumentError(
                f"num_required must be at most {limit}, got {required}"
            )
        least = None if at_least is None else positive_count(at_least, "at_least")
        if least is not None and least > required:
            raise InvalidArgumentError(
                f"at_least must be at most num_required, {required}, got {least}"
            )
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        shared = self._shared
        # A take would wait for a gradient that this rank has not completed.
        shared.writer.finish(deadline)
        while True:
            try:
                with shared.hold_round(required, deadline, at_least=least) as closed:
                    value = self._reduce(closed, target, deadline)
                    return Taken(value, closed.count, closed.weight, closed.step)
            except LostNodeError:
                # A node with gradients of the round is lost; the others are taken.
                continue

    def _check_target(self, target: Any) -> None:
        """Raise an error if `_reduce` cannot put the result there."""
        raise NotImplementedError

    def _reduce(self, closed: Closed, target: Any, deadline: Deadline) -> Any:
        """Return the reduction of a round, where the caller of a take wants it."""
        raise NotImplementedError

    def num_accumulated(self, name: str | None = None) -> int:
        """Return how many gradients no take has returned yet; never waits."""
        self._check_open()
        return self._protocol.count()

    def set_global_step(
        self, new_global_step: SupportsInt, name: str | None = None
    ) -> None:
        """Set the step, also to a lower one; accumulated gradients stay.

        Raises:
            InvalidArgumentError: If it is not one number above -2**40 and below 2**40
                (2**32 if the shape is not fixed).
        """
        self._check_open()
        new = step_number(new_global_step, "new_global_step")
        old = self._protocol.set_step(new)
        if new < old:
            logger.warning("%s: step lowered from %d to %d", self._name, old, new)

    def leave(self) -> None:
        """Promise that this rank contributes no more gradients. Not collective.

        Quorums shrink: a take that requires more gradients than there are present ranks
        waits for one gradient of each; or, if it requires several of each worker, for
        as many of each as before. On a host that is not a worker, this call has no
        effect.
        """
        self._check_open()
        self._shared.leave()

    def statistics(self) -> AccumulatorStatistics:
        """Return the numbers of all ranks; any rank may call it."""
        self._check_open()
        return AccumulatorStatistics(
            self._protocol.state().step,
            self._protocol.count(),
            self._protocol.weight(),
            self._shared.tally(),
            tuple(self._protocol.membership.left()),
            tuple(self._protocol.membership.lost()),
            self._protocol.num_lost(),
            self._settings.storage,
            self._storage.window_bytes,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the step and the counts, for `restore`; any rank may call it.

        Returns:
            "global_step"; "tally", the counts of `statistics` as lists; and
            "num_accumulated", the gradients that no take has returned. They are in the
            tally, but they are not part of the snapshot: take them before.
        """
        found = self.statistics()
        return {
            "global_step": found.global_step,
            "tally": found.tally.as_lists(),
            "num_accumulated": found.num_accumulated,
        }

    def restore(self, snapshot: Mapping[str, Any] | None) -> None:
        """Continue at the step and with the counts of a snapshot. Collective.

        Call it before gradients are applied. The number of ranks may be different.

        Args:
            snapshot: On the host rank; others may pass None.

        Raises:
            TypeError, InvalidArgumentError: On every rank, if it is not a snapshot.
        """
        self._check_open()
        group, host = self._shared.group, self._settings.host
        what = f"{self._name}: restore"

        def begin() -> Tally | None:
            if group.rank != host:
                return None
            if not isinstance(snapshot, Mapping) or "global_step" not in snapshot:
                found = "None" if snapshot is None else f"a {type(snapshot).__name__}"
                raise TypeError(f"snapshot must come from an accumulator, got {found}")
            step = step_number(snapshot["global_step"], "global_step")
            tally = Tally.of_lists(snapshot.get("tally", {}))
            self._protocol.set_step(step)
            return tally

        tally = group.agree(what, begin, lambda _: {})
        # No rank applies a gradient before this.
        self._shared.earlier = group.allgather(tally, what)[host]

    def _describe(self) -> str:
        return f"accumulator {self._name!r}"

    def _check_open(self) -> None:
        # The end of the program frees what handles share, not the handles.
        if self._freed or self._shared._freed:
            raise FreedError(f"{self._describe()} was freed")

    def __del__(self) -> None:
        """Warn if it was dropped without `free`, which is collective."""
        shared = getattr(self, "_shared", None)
        if shared is not None and not (self._freed or shared.freed):
            warnings.warn(
                f"accumulator {self._name!r} was dropped without free(): its shared "
                f"memory stays in use until the program ends",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def free(self) -> None:
        """Free the accumulator; the last of several with a shared name. Collective.

        Calling it again does nothing. Arrays that `slot` returned become ordinary
        memory, which nothing else uses.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, on all ranks that wait;
                names the missing ranks. Another call on all ranks does the rest.
        """
        super().free()

    def _free(self) -> None:
        self._shared.detach()

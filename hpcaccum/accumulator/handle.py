"""The handle of an accumulator: what dense and sparse ones have in common."""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, SupportsInt, TypeVar

from hpcaccum.accumulator.receipts import Tally
from hpcaccum.accumulator.shared import AccumulatorStatistics, SharedAccumulator
from hpcaccum.arguments import positive_count, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import FreedError, InvalidArgumentError
from hpcaccum.mpi import Freeable
from hpcaccum.nodes import LostNodeError

if TYPE_CHECKING:
    import numpy as np

    from hpcaccum.accumulator.settings import Settings
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.mpi import Group

logger = logging.getLogger("hpcaccum")


T = TypeVar("T")


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
        self._attach(group, name, settings)

    def _attach(self, group: Group, name: str, settings: Settings) -> None:
        """Attach to the accumulator of settings that all ranks agree on. Collective."""
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
        required = self._required(num_required)
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
            # If a node with gradients of the round is lost, the others are taken.
            with (
                contextlib.suppress(LostNodeError),
                shared.hold_round(required, deadline, at_least=least) as closed,
            ):
                value = self._reduce(closed, target, deadline)
                return Taken(value, closed.count, closed.weight, closed.step)

    def _reduce(self, closed: Closed, target: Any, deadline: Deadline) -> Any:
        """Return the reduction of a round, where the caller of a take wants it."""
        raise NotImplementedError

    def _required(self, num_required: SupportsIndex) -> int:
        required = positive_count(num_required, "num_required")
        limit = self._protocol.packing.max_count
        if required > limit:
            raise InvalidArgumentError(
                f"num_required must be at most {limit}, got {required}"
            )
        return required

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

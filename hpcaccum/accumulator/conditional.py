"""ConditionalAccumulator: sums gradients of any rank, and drops stale ones.

`Accumulator` is what it has in common with `SparseConditionalAccumulator`.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, SupportsInt, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from hpcaccum.accumulator.receipts import Receipt, Tally
from hpcaccum.accumulator.settings import Settings, check_settings
from hpcaccum.accumulator.shared import SharedAccumulator
from hpcaccum.accumulator.state import Closed
from hpcaccum.arguments import (
    gradient_array,
    positive_count,
    positive_weight,
    result_array,
    step_number,
)
from hpcaccum.deadline import Deadline
from hpcaccum.device import copyto
from hpcaccum.dtypes import Array, accumulation_dtype, quiet
from hpcaccum.errors import FreedError, InvalidArgumentError
from hpcaccum.mpi import Freeable, Group, group_of
from hpcaccum.nodes import LostNodeError
from hpcaccum.rows import IndexedSlices

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")


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
        if target is not None:
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
        call = f"take_grad({required})"
        if least is not None:
            call = f"take({required}, at_least={least})"
        deadline = Deadline(timeout, f"{self._name}: {call}")
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


class ConditionalAccumulator(Accumulator):
    """Accumulates gradients of any rank, if they are not stale. Collective.

    The accumulator has a step, 0 at first. A gradient whose ``local_step`` is less than
    that step is dropped; any other is added. A take waits for a number of gradients,
    returns the reduction of *all* accumulated ones, and advances the step by one.

    Applying and taking are not collective: any rank may call them at any time. An apply
    never waits for another writer, and a stale gradient of more than 8 KiB is never
    sent.

    Args:
        dtype: float16, float32, float64 or bfloat16. Half precision is summed in
            float32.
        shape: Of the gradients; None or None entries are unknown. The first gradient
            accepted in a round then fixes the shape of that round.
        shared_name: If not empty, all accumulators of one communicator with this name
            are one object.
        name: For messages.
        reduction_type: ``"MEAN"`` (of all gradients accumulated) or ``"SUM"``; both
            with their weights.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank on whose node are the step, and the sums of ``storage="sum"``.
        capacity: Maximum number of elements of a gradient; needed if the shape is not
            fixed.
        storage: ``"slots"``: two buffers per rank, on its own node, summed in rank
            order on each node, then in the order of the nodes: the same bits in any
            order of arrival. Several gradients of one rank in one round are added in
            the order in which that rank applied them; its threads must fix that order
            themselves. ``"sum"``: two sums on the host's node, which take less memory,
            in the order of arrival; between nodes every gradient is sent.
        workers: How many ranks contribute gradients, all by default. If not all do, the
            host rank does not. Quorums shrink when ranks leave; after this number of
            ranks has left, takes raise EverybodyLeftError.

    Raises:
        InvalidArgumentError, TypeError: On every rank, for an invalid argument.
        DisagreementError: On every rank, if the ranks' arguments differ.

    Source: the behavior of TensorFlow's ``tf.compat.v1.ConditionalAccumulator``.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        shape: int | Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        capacity: int | None = None,
        storage: str = "slots",
        workers: int | None = None,
    ) -> None:
        group = group_of(comm)
        given = dtype, shape, shared_name, reduction_type, host, workers
        super().__init__(
            group,
            name,
            lambda: check_settings(group.size, given, capacity, storage),
        )

    def apply_grad(
        self,
        grad: ArrayLike | IndexedSlices,
        local_step: SupportsInt = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Add a gradient, unless it is stale.

        Returns as soon as the gradient is in place; never waits for another writer.
        The caller's array may be changed afterwards.

        Args:
            grad: Array of the accumulator's shape; any real dtype, converted to the
                accumulator's. The array that `slot` returned is not copied. A device
                array (CuPy) is copied once, by the device. An `IndexedSlices` with a
                ``dense_shape`` becomes an array.
            local_step: The step at which the gradient was computed; one number.
            name: Ignored.
            weight: What it counts in the reduction, such as the number of samples in
                its batch. It multiplies the gradient while that is copied; one in a
                slot, when the sum is formed.

        Returns:
            Whether it was accepted, and the accumulator's step.

        Raises:
            InvalidArgumentError: On this rank, for a wrong shape, dtype or step, a
                weight that is not a finite number above 0, or an array in a slot that
                was applied before, or if this rank has left; nothing is added. The
                shape of a stale gradient is not checked.
            WaitTimeoutError: If the host is on another node and its agent does not
                answer within HPCACCUM_TIMEOUT seconds. It may still accept the
                gradient, so a slot that contains it must not be changed: the next
                `apply_grad` or `slot` of this rank waits for the answer first.
            BrokenObjectError: If an exception has ended an earlier call.
            Exception: Anything else, except what a signal handler raises while this
                rank waits for an agent: this rank has left the accumulator, and the
                gradient may be lost. The other ranks go on.
        """
        self._check_open()
        step = step_number(local_step, "local_step")
        if isinstance(grad, IndexedSlices):
            grad = grad.to_dense(self._wide)
        array = gradient_array(grad, self._settings.dtype)
        number = positive_weight(weight, self._wide)
        return self._shared.writer.submit(array, step, number)

    def slot(
        self, shape: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> Array:
        """Return memory in which to compute the next gradient of this rank.

        With ``storage="slots"``, `apply_grad` of this array copies nothing. The array
        belongs to the calling thread until one of its gradients is accepted, in this
        array or in another. Then it is read-only, and `apply_grad` rejects it: call
        `slot` for each gradient. Its contents are arbitrary. For float16 and bfloat16
        it is float32, in which they are summed.

        A rank has two slots. While one thread has a slot, other threads of this rank
        that apply gradients may have to wait for a take.

        Args:
            shape: Needed if the accumulator's is not fixed.
            timeout: Seconds to wait, if both slots are in use. A slot becomes free when
                the round that holds it is reduced, or when the thread that has it
                applies it.

        Raises:
            InvalidArgumentError, TypeError: For a ``shape`` or ``timeout`` that is
                wrong, or a shape that is missing.
            WaitTimeoutError: If no slot is free in time.
        """
        self._check_open()
        wanted = self._protocol.shapes.slot_shape(shape)
        deadline = Deadline(timeout, f"{self._name}: slot")
        return self._shared.writer.slot(wanted, deadline)

    def take_grad(
        self,
        num_required: SupportsIndex,
        name: str | None = None,
        *,
        timeout: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """Wait for ``num_required`` gradients; return their reduction and reset.

        The reduction is over *all* accumulated gradients, which may be more. A sum is
        that of the gradients times their weights; a mean is this sum divided once by
        the sum of the weights. Taking advances the step by one. Takes of several ranks
        are served first come, first served.

        Args:
            num_required: At least 1. Ranks that have left are not waited for.
            name: Ignored.
            timeout: Seconds to wait for gradients; 0 tries once; None waits, with
                warnings. To collect those of other nodes then takes at most a minute,
                or ``timeout`` if that is longer.
            out: Contiguous array for the result, of the accumulator's dtype and the
                round's shape; it may be on a device. To allocate a long result costs
                as much as the sum.

        Returns:
            ``out``, else a new array.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is not an
                integer of at least 1, a ``timeout`` that is not a number of at least 0,
                or an ``out`` that does not fit; nothing is lost.
            WaitTimeoutError: States what was missing. Nothing is lost: gradients stay,
                and the next take returns a round that was already closed. The same
                holds for any other exception that ends a wait or the summation.
            EverybodyLeftError: At once, if all ranks have left and the round has no
                gradient.
        """
        taken: Taken[Array] = self._take(num_required, None, timeout, out)
        return taken.value

    def take(
        self,
        num_required: SupportsIndex,
        *,
        timeout: float | None = None,
        at_least: SupportsIndex | None = None,
        out: Array | None = None,
    ) -> Taken[Array]:
        """Do as `take_grad`, and return how many gradients the result has.

        Args:
            num_required: As for `take_grad`.
            timeout: Likewise.
            out: Likewise.
            at_least: If given, a take whose ``timeout`` passes returns the reduction of
                what has been accepted by then, if those are so many gradients or more.
                It shrinks as ``num_required`` does when ranks have left.

        Returns:
            The reduction, the number of its gradients and the sum of their weights, and
            the step at which they were accepted.

        Raises:
            InvalidArgumentError, TypeError: As `take_grad`, and for an ``at_least``
                that is not an integer of 1 to ``num_required``.
            WaitTimeoutError: As `take_grad`; with ``at_least`` also if another take is
                ahead when ``timeout`` passes, or an accepted gradient is not in place
                half a second later.
            EverybodyLeftError: As `take_grad`.
        """
        return self._take(num_required, at_least, timeout, out)

    def _check_target(self, target: Array | None) -> None:
        shape = self._protocol.shapes.only
        if shape is not None:
            result_array(target, self._settings.dtype, shape)

    def _reduce(
        self, closed: Closed, target: Array | None, deadline: Deadline
    ) -> Array:
        shape, dtype = closed.shape, self._settings.dtype
        if target is not None:
            result_array(target, dtype, shape)
        # What is for the device is computed in CPU memory.
        result = target if isinstance(target, np.ndarray) else np.empty(shape, dtype)
        with quiet():
            self._storage.total(closed, result.reshape(-1), deadline)
        if target is None or target is result:
            return result
        copyto(target, result)
        return target

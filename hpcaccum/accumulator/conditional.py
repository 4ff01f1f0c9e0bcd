"""ConditionalAccumulator: sums gradients of any rank, and drops stale ones."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.receipts import Tally
from hpcaccum.accumulator.settings import Settings, check_settings
from hpcaccum.accumulator.shared import AccumulatorStatistics, SharedAccumulator
from hpcaccum.accumulator.storage import Slots
from hpcaccum.arguments import gradient_array, positive_count, result_array, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.errors import FreedError, InvalidArgumentError
from hpcaccum.mpi import Freeable, Group

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.accumulator.batch import Batch
    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.nodes import NodeParts

logger = logging.getLogger("hpcaccum")

Array = np.ndarray[Any, Any]


class ConditionalAccumulator(Freeable):
    """Accumulates gradients of any rank, if they are not stale. Collective.

    The accumulator has a step, 0 at first. A gradient whose ``local_step`` is less than
    that step is dropped, others are added. Taking waits for a number of gradients,
    returns the reduction of *all* accumulated ones, and advances the step by one.

    Applying and taking are not collective: any rank calls them at any time. An apply
    never waits for another writer, and a stale gradient is never sent.

    Args:
        dtype: float16, float32, float64 or bfloat16. Half precision is summed in
            float32.
        shape: Of the gradients; None or None entries are unknown. The first gradient
            accepted in a round then fixes the shape of that round.
        shared_name: If not empty, all accumulators of one communicator with this name
            are one object.
        name: For messages.
        reduction_type: ``"MEAN"`` (of all gradients accumulated) or ``"SUM"``.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank that holds the step, and the sums of ``storage="sum"``.
        capacity: Maximum number of elements of a gradient; needed if the shape is not
            fixed.
        storage: ``"slots"``: two buffers per rank, on its own node, summed in rank
            order on each node, then in the order of the nodes: the same bits in any
            order of arrival. Several gradients of one rank in one round are added in
            the order in which that rank applied them; its threads must fix that order
            themselves. ``"sum"``: two sums on the host rank, which take less memory, in
            the order of arrival; between nodes every gradient is sent. ``"auto"``:
            slots.
        workers: How many ranks contribute gradients, all by default. If not all, the
            host rank does not. Quorums shrink when ranks leave; after so many have
            left, takes raise EverybodyLeftError.

    Raises:
        InvalidArgumentError, TypeError: On every rank, for an invalid argument.
        DisagreementError: On every rank, if the ranks' arguments differ.

    Source: the behaviour of TensorFlow's ``tf.compat.v1.ConditionalAccumulator``.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        dtype: Any,
        shape: Any = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        capacity: int | None = None,
        storage: str = "auto",
        workers: int | None = None,
    ) -> None:
        group = Group.of(comm)

        def check() -> Settings:
            return check_settings(
                dtype=dtype,
                shape=shape,
                shared_name=shared_name,
                reduction=reduction_type,
                host=host,
                capacity=capacity,
                storage=storage,
                workers=group.size if workers is None else workers,
                size=group.size,
            )

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
        self._protocol, self._storage = shared.protocol, shared.storage

    def __repr__(self) -> str:
        """Show the step and the number of gradients."""
        if self._freed or self._shared.freed:
            return f"<ConditionalAccumulator {self._name!r}, freed>"
        state = self._protocol.state()
        return (
            f"<ConditionalAccumulator {self._name!r} {self.dtype} "
            f"{self._settings.shape}: step {state.step}, {self._protocol.count()} "
            f"accumulated, {self._storage.name}>"
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

    def apply_grad(
        self, grad: Any, local_step: Any = 0, name: str | None = None
    ) -> Receipt:
        """Add a gradient, unless it is stale.

        Returns as soon as the gradient is in place; never waits for another writer.
        The caller's array may be changed afterwards.

        Args:
            grad: Array of the accumulator's shape; any real dtype, converted to the
                accumulator's. The array that `slot` returned is not copied. A device
                array (CuPy) is copied once, by the device.
            local_step: The step at which the gradient was computed; one number.
            name: Ignored.

        Returns:
            Whether it was accepted, and the accumulator's step.

        Raises:
            InvalidArgumentError: On this rank, for a wrong shape, dtype or step, or an
                array in a slot that was applied before; nothing is added. The shape of
                a stale gradient is not checked.
            Exception: Anything else, as a MemoryError or what a signal handler raises:
                the gradient is withdrawn and counts as ``given_up``, or it was in place
                already and counts as accepted.
        """
        self._check_open()
        step = step_number(local_step, "local_step")
        array = gradient_array(grad, self.dtype)
        return self._shared.writer.submit(array, step)

    def slot(self, shape: Any = None, *, timeout: float | None = None) -> Array:
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
            WaitTimeoutError: If no slot is free in time.
        """
        self._check_open()
        wanted = self._protocol.shapes.slot_shape(shape)
        deadline = Deadline(timeout, f"{self._name}: slot")
        return self._shared.writer.slot(wanted, deadline)

    def pin_slots(self) -> None:
        """Pin this rank's slots, so that the CUDA device copies to them directly.

        The first gradient from a device does so, too.
        """
        self._check_open()
        self._storage.pin()

    def take_grad(
        self,
        num_required: Any,
        name: str | None = None,
        *,
        timeout: float | None = None,
        out: Array | None = None,
    ) -> Array:
        """Wait for ``num_required`` gradients; return their reduction and reset.

        The reduction is over *all* accumulated gradients, which may be more; a mean is
        their sum divided once by their number. Taking advances the step by one. Takes
        of several ranks are served first come, first served.

        Args:
            num_required: At least 1. Ranks that have left are not waited for.
            name: Ignored.
            timeout: Seconds to wait; 0 tries once; None waits, with warnings.
            out: Contiguous array for the result, of the accumulator's dtype and the
                round's shape; it may be on a device. To allocate a long result costs
                as much as the sum.

        Returns:
            ``out``, else a new array.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is not an
                integer of at least 1, or an ``out`` that does not fit; nothing is lost.
            WaitTimeoutError: Names what was missing. Nothing is lost: gradients stay,
                and the next take returns a round that was closed already. The same
                holds for any other exception, except one that a signal handler raises
                when the result is complete.
            EverybodyLeftError: At once, if all ranks have left and the round has no
                gradient.
        """
        self._check_open()
        required = self._required(num_required)
        only_shape = self._protocol.shapes.only
        if out is not None and only_shape is not None:
            result_array(out, self.dtype, only_shape)
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        return self._shared.taker.take(required, deadline, out)

    @property
    def parts(self) -> NodeParts:
        """The memory of all slots; not for ``storage="sum"``."""
        storage = self._storage
        assert isinstance(storage, Slots)
        return storage.parts

    def take_batch(
        self, num_required: int, deadline: Deadline, use: Callable[[Batch], None]
    ) -> None:
        """Do as `take_grad`, but let ``use`` read the gradients where they lie.

        For callers inside the package; see `Taker.take_batch`.
        """
        self._check_open()
        required = self._required(num_required)
        self._shared.taker.take_batch(required, deadline, use)

    def _required(self, num_required: Any) -> int:
        required = positive_count(num_required, "num_required")
        limit = self._protocol.packing.max_count
        if required > limit:
            raise InvalidArgumentError(
                f"num_required is at most {limit}, got {required}"
            )
        return required

    def num_accumulated(self, name: str | None = None) -> int:
        """Return how many gradients no take has returned yet; never waits."""
        self._check_open()
        return self._protocol.count()

    def set_global_step(self, new_global_step: Any, name: str | None = None) -> None:
        """Set the step, also to a lower one; accumulated gradients stay.

        Raises:
            InvalidArgumentError: If it is not one number, or beyond +-2**40 (2**32 if
                the shape is not fixed).
        """
        self._check_open()
        new = step_number(new_global_step, "new_global_step")
        old = self._protocol.set_step(new)
        if new < old:
            logger.warning("%s: step lowered from %d to %d", self._name, old, new)

    def count_nonfinite(self) -> None:
        """Count a gradient of this rank that is not finite, and was not applied."""
        self._check_open()
        self._protocol.counters.count_nonfinite()

    def leave(self) -> None:
        """Promise that this rank contributes no more gradients. Not collective.

        Quorums shrink: a take that requires more gradients than there are present ranks
        waits for one of each.
        """
        self._check_open()
        self._shared.writer.leave()

    def awaited(self, num_required: int, step: int) -> str | None:
        """Return what a take at a step still waits for, for messages; None if nothing.

        Any rank may call it.
        """
        return self._protocol.awaited(num_required, step)

    def statistics(self) -> AccumulatorStatistics:
        """Return the numbers of all ranks; any rank may call it."""
        self._check_open()
        return AccumulatorStatistics(
            self._protocol.state().step,
            self._protocol.count(),
            self._shared.tally(),
            tuple(self._protocol.membership.left()),
            self._storage.name,
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

    def restore(self, snapshot: Any) -> None:
        """Continue at the step and with the counts of a snapshot. Collective.

        Call it before gradients are applied. The number of ranks may be another one.

        Args:
            snapshot: On the host rank; others may pass None.

        Raises:
            TypeError, InvalidArgumentError: On every rank, if it is none.
        """
        self._check_open()
        group, host = self._shared.group, self._settings.host
        what = f"{self._name}: restore"

        def begin() -> Tally | None:
            if group.rank != host:
                return None
            step, tally = _counts(snapshot)
            self._protocol.set_step(step)
            return tally

        tally = group.agree(what, begin, lambda _: {})
        # No rank applies a gradient before this.
        self._shared.earlier = group.allgather(tally, what)[host]

    def _describe(self) -> str:
        return f"accumulator {self._name!r}"

    def _check_open(self) -> None:
        # The end of the program frees what handles share, not the handles.
        if self._freed or self._shared.freed:
            raise FreedError(f"{self._describe()} was freed")

    def __del__(self) -> None:
        """Warn if it was dropped without `free`, which is collective."""
        shared = getattr(self, "_shared", None)
        if shared is not None and not (self._freed or shared.freed):
            warnings.warn(
                f"accumulator {self._name!r} was dropped without free(): its memory "
                f"and its communicator of MPI stay in use until the program ends",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def free(self) -> None:
        """Free the accumulator; the last of several with a shared name. Collective.

        Calling it again does nothing. Arrays that `slot` returned become ordinary
        memory, which nothing else uses.
        """
        super().free()

    def _free(self) -> None:
        self._shared.detach()


def _counts(snapshot: Any) -> tuple[int, Tally]:
    """Return the step and the tally of a snapshot."""
    if not isinstance(snapshot, Mapping) or "global_step" not in snapshot:
        found = "None" if snapshot is None else f"a {type(snapshot).__name__}"
        raise TypeError(f"snapshot must be one of an accumulator, got {found}")
    step = step_number(snapshot["global_step"], "global_step")
    return step, Tally.of_lists(snapshot.get("tally", {}))

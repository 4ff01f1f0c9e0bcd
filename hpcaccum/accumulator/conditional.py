"""ConditionalAccumulator: gradients from any rank, summed on condition of freshness."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.settings import Settings, check_settings
from hpcaccum.accumulator.shapes import (
    Shape,
    compatible,
    declared_shape,
    is_fixed,
    known,
    size_of,
)
from hpcaccum.accumulator.shared import AccumulatorStatistics, SharedAccumulator
from hpcaccum.arguments import gradient_array, positive_count, result_array, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.device import copyto, is_device
from hpcaccum.errors import FreedError, InvalidArgumentError
from hpcaccum.mpi import Freeable, Group

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.accumulator.state import Closed

logger = logging.getLogger("hpcaccum")

Array = np.ndarray[Any, Any]


class ConditionalAccumulator(Freeable):
    """Accumulates gradients of any rank, if they are not stale. Collective.

    The accumulator has a step of its own, 0 at first. A gradient whose ``local_step``
    is less than that step is dropped, others are added. Taking the reduction waits for
    a number of gradients, returns the reduction of *all* there are, and moves on to
    the next step.

    Applying and taking are not collective: any rank calls them when it wants to. An
    apply never waits for another writer, and a stale gradient is never sent.

    Args:
        dtype: float16, float32, float64 or bfloat16. The halves are summed in float32.
        shape: Of the gradients; None or None entries are unknown. The first gradient
            accepted in a round then fixes the shape of that round.
        shared_name: If not empty, all accumulators of one communicator with this name
            are one object.
        name: For messages.
        reduction_type: ``"MEAN"`` (of all gradients accumulated) or ``"SUM"``.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank that holds the step, and the gradients across nodes.
        capacity: Elements of a gradient at most; needed if the shape is not fixed.
        storage: ``"slots"``: two buffers for each rank, sums in rank order, the same
            bits in any order of arrival. Several gradients of one rank in one round
            are added in the order in which that rank applied them; its threads must
            fix that order themselves. ``"sum"``: two sums on the host, less memory, in
            the order of arrival. ``"auto"``: slots on one node, else what memory
            allows.
        workers: How many ranks bring gradients, all by default, else all but the host
            or fewer; quorums shrink from there when ranks leave. Takes end when so
            many have left.

    Raises:
        InvalidArgumentError, TypeError: On every rank, for an unusable argument.
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
        checked: list[Settings] = []

        def facts() -> dict[str, object]:
            checked.append(
                check_settings(
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
            )
            return {"name": name, **vars(checked[0])}

        kind = type(self).__name__
        group.agree(f"{kind} {name!r}", facts, call=kind)
        self._name, self._freed = name, False
        self._shared = self._attach(group, checked[0])
        self._shared.users += 1
        rounds, self._settings = self._shared.rounds, self._shared.settings
        self._rounds, self._storage = rounds, self._shared.storage
        self._number = next(self._numbers)
        shape = self._settings.shape
        # The shape of every round; None if rounds differ.
        self._only_shape = known(shape) if is_fixed(shape) else None

    def _attach(self, group: Group, settings: Settings) -> SharedAccumulator:
        """Return the object of this shared name, or a new one. Collective."""
        if not settings.shared_name:
            return SharedAccumulator(group, settings, self._name)
        key = f"accumulator {settings.shared_name}"
        if key not in group.shared:
            group.shared[key] = SharedAccumulator(group, settings, self._name)
        existing: SharedAccumulator = group.shared[key]
        for field, value in vars(settings).items():
            old = getattr(existing.settings, field)
            if old != value:
                raise InvalidArgumentError(
                    f"accumulator with shared_name {settings.shared_name!r} exists "
                    f"with {field} {old}, got {value}"
                )
        return existing

    def __repr__(self) -> str:
        """Show the numbers."""
        if self._freed or self._shared.opened.closed:
            return f"<ConditionalAccumulator {self._name!r}, freed>"
        state = self._rounds.state()
        return (
            f"<ConditionalAccumulator {self._name!r} {self.dtype} "
            f"{self._settings.shape}: step {state.step}, {self._rounds.count()} "
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
        """Text that tells the objects of one communicator apart, on one rank."""
        shared = self._settings.shared_name
        return f"shared:{shared}" if shared else f"{self._name}:{self._number}"

    @property
    def global_step(self) -> int:
        """The accumulator's step now."""
        self._check_open()
        return self._rounds.state().step

    def apply_grad(
        self, grad: Any, local_step: Any = 0, name: str | None = None
    ) -> Receipt:
        """Add a gradient, unless it is stale.

        Returns as soon as the gradient is in place; never waits for another rank that
        writes. The caller's array may be changed afterwards.

        Args:
            grad: Array of the accumulator's shape; any real dtype, converted to the
                accumulator's. If it is the array that `slot` gave, nothing is copied.
                From a device (CuPy's) it is copied once, by the device itself.
            local_step: The step the gradient was computed at; one number.
            name: Ignored.

        Returns:
            What happened, and at which step.

        Raises:
            InvalidArgumentError: On this rank, for a wrong shape, dtype or step, or an
                array in a slot that was applied before; nothing is added. A stale
                gradient's shape is not looked at.
            Exception: Anything else, as a MemoryError or what a signal handler raises:
                the gradient is taken back and counts as ``given_up``, or it was in
                place already and counts as accepted.
        """
        self._check_open()
        step = step_number(local_step, "local_step")
        array = gradient_array(grad, self.dtype)
        return self._shared.writer.submit(
            array, step, lambda fixed: self._fit(array, fixed)
        )

    def _fit(self, array: Array, fixed: int) -> int:
        """Check the shape; return its number, 0 where all rounds have one shape."""
        settings = self._settings
        if array.shape == self._only_shape:
            return 0
        if fixed and (shape := self._shared.shapes.shape(fixed)) != array.shape:
            raise self._misfit(array, f"{shape}, as the others of this round")
        if not compatible(array.shape, settings.shape):
            raise self._misfit(array, str(settings.shape))
        if array.size > settings.capacity:
            raise self._misfit(array, f"of at most {settings.capacity} elements")
        return fixed or self._shared.shapes.number(array.shape)

    def _misfit(self, array: Array, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._name}: gradient must be {self.dtype} {expected}, "
            f"got {array.dtype} {array.shape}"
        )

    def slot(self, shape: Any = None, *, timeout: float | None = None) -> Array:
        """Return memory in which to compute the next gradient of this rank.

        `apply_grad` of this array copies nothing where the ranks share a node. It is
        the calling thread's until a gradient that it applies is accepted, this one or
        another; then it is read-only, and `apply_grad` refuses it: ask for a slot for
        each gradient. Its contents are arbitrary. For float16 and bfloat16 it is
        float32, in which they are summed.

        There are two. While one thread has a slot, those of others that apply
        gradients may have to wait for a take.

        Args:
            shape: Needed if the accumulator's is not fixed.
            timeout: Seconds. With one round open and one being reduced that both have
                a gradient of this rank, the slot is free after the reduction; a slot
                of another thread when that has applied it.

        Raises:
            WaitTimeoutError: If no slot is free in time.
        """
        self._check_open()
        wanted = self._slot_shape(shape)
        deadline = Deadline(timeout, f"{self._name}: slot")
        return self._shared.writer.slot(wanted, deadline)

    def _slot_shape(self, shape: Any) -> Shape:
        if shape is None and self._only_shape is not None:
            return self._only_shape
        settings, wanted = self._settings, declared_shape(shape)
        if wanted is None or not is_fixed(wanted):
            raise InvalidArgumentError(
                f"{self._name}: slot needs a shape, as that of the accumulator is "
                f"{settings.shape}"
            )
        fits = compatible(known(wanted), settings.shape)
        if not fits or size_of(wanted) > settings.capacity:
            raise InvalidArgumentError(
                f"{self._name}: slot must have shape {settings.shape} and at most "
                f"{settings.capacity} elements, got {wanted}"
            )
        return known(wanted)

    def pin_slots(self) -> None:
        """Let the CUDA device copy to this rank's slots by itself.

        Done by the first gradient that comes from there.
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

        The reduction is over *all* gradients accumulated, which may be more; a mean is
        their sum divided once by their number. Taking moves the accumulator to the
        next step. Takes of several ranks are served first come, first served.

        Args:
            num_required: At least 1. Ranks that have left are not waited for.
            name: Ignored.
            timeout: Seconds; 0 looks once; None waits, with warnings.
            out: Contiguous array for the result, of the accumulator's dtype and the
                round's shape; it may be on a device. A new one costs as much as the
                sum, if it is long.

        Returns:
            ``out``, else a new array.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is no integer
                of at least 1, or an ``out`` that does not fit; nothing is lost.
            WaitTimeoutError: Says what was missing. Nothing is lost: gradients stay,
                and a round that was closed already is what the next take returns. So
                it is after any other exception, but one that a signal handler raises
                when the result is complete.
            EverybodyLeftError: At once, if all ranks have left and none is there.
        """
        self._check_open()
        required = positive_count(num_required, "num_required")
        limit = self._rounds.packing.max_count
        if required > limit:
            raise InvalidArgumentError(
                f"num_required is at most {limit}, got {required}"
            )
        if out is not None and self._only_shape is not None:
            result_array(out, self.dtype, self._only_shape)
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        return self._rounds.take(
            required, deadline, lambda closed: self._reduce(closed, out), self._clear
        )

    def _shape_of(self, closed: Closed) -> Shape:
        if self._only_shape is not None:
            return self._only_shape
        return self._shared.shapes.shape(closed.shape)

    def _clear(self, closed: Closed) -> None:
        self._storage.clear(closed.parity, size_of(self._shape_of(closed)))

    def _reduce(self, closed: Closed, out: Array | None) -> Array:
        shape = self._shape_of(closed)
        found = result_array(out, self.dtype, shape)
        result = np.empty(shape, self.dtype) if is_device(found) else found
        divisor = closed.count if self._settings.reduction == "MEAN" else 1
        # Infinity is for the user to see, as the value that it is.
        with np.errstate(all="ignore"):
            self._storage.total(closed, divisor, result.reshape(-1))
        if found is not result:
            copyto(found, result)
        return found

    def num_accumulated(self, name: str | None = None) -> int:
        """Return how many gradients no take has handed out yet; never waits."""
        self._check_open()
        return self._rounds.count()

    def set_global_step(self, new_global_step: Any, name: str | None = None) -> None:
        """Set the step, also to a lower one; gradients accumulated stay.

        Raises:
            InvalidArgumentError: If it is not one number, or beyond +-2**40 (2**32 if
                the shape is not fixed).
        """
        self._check_open()
        new = step_number(new_global_step, "new_global_step")
        old = self._rounds.set_step(new)
        if new < old:
            logger.warning("%s: step lowered from %d to %d", self._name, old, new)

    def leave(self) -> None:
        """Say that this rank brings no more gradients: quorums shrink. Not collective.

        A take that wants more gradients than there are ranks left is content with one
        of each.
        """
        self._check_open()
        self._shared.writer.leave()

    def awaited(self, num_required: int, step: int) -> str | None:
        """Return what a take at a step still waits for, for messages; None if nothing.

        Any rank may ask.
        """
        return self._rounds.awaited(num_required, step)

    def statistics(self) -> AccumulatorStatistics:
        """Return the numbers, of all ranks; any rank may ask."""
        self._check_open()
        return AccumulatorStatistics(
            self._rounds.state().step,
            self._rounds.count(),
            self._rounds.ledger.tally(),
            tuple(self._rounds.membership.left()),
            self._storage.name,
            self._storage.region.nbytes_here,
        )

    def _check_open(self) -> None:
        if self._freed or self._shared.opened.closed:
            raise FreedError(f"accumulator {self._name!r} was freed")

    def __del__(self) -> None:
        """Warn if it was dropped without `free`, which is collective."""
        shared = getattr(self, "_shared", None)
        if shared is not None and not (self._freed or shared.opened.closed):
            warnings.warn(
                f"accumulator {self._name!r} was dropped without free(): its memory "
                f"and its communicator of MPI stay in use until the program ends",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def free(self) -> None:
        """Free the accumulator; the last of several with a shared name. Collective.

        Calling it again does nothing. Arrays given by `slot` are ordinary memory from
        then on, which nobody else uses.
        """
        if self._freed:
            return
        if self._shared.users == 1:
            self._shared.opened.close()
            self._shared.group.shared.pop(
                f"accumulator {self._settings.shared_name}", None
            )
        self._shared.users -= 1
        self._freed = True

"""ConditionalAccumulator: sums gradients of any rank, and drops stale ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex, SupportsInt

import numpy as np

from hpcaccum.accumulator.handle import Accumulator, Taken
from hpcaccum.accumulator.settings import check_settings
from hpcaccum.arguments import (
    gradient_array,
    positive_weight,
    result_array,
    step_number,
)
from hpcaccum.deadline import Deadline
from hpcaccum.device import copyto, is_device
from hpcaccum.mpi import Group, group_of
from hpcaccum.rows import IndexedSlices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI as mpi4py_MPI
    from numpy.typing import ArrayLike, DTypeLike

    from hpcaccum.accumulator.receipts import Receipt
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.dtypes import Array


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
                its batch. It multiplies the gradient when the sum is formed.

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
        if target is not None and shape is not None:
            result_array(target, self._settings.dtype, shape)

    def _reduce(
        self, closed: Closed, target: Array | None, deadline: Deadline
    ) -> Array:
        shape, dtype = closed.shape, self._settings.dtype
        found = result_array(target, dtype, shape)
        result = np.empty(shape, dtype) if is_device(found) else found
        # No warning: an overflow shows up as inf in the result.
        with np.errstate(all="ignore"):
            self._storage.total(closed, result.reshape(-1), deadline)
        if found is not result:
            copyto(found, result)
        return found

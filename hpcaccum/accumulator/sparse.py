"""SparseConditionalAccumulator: sums gradients that have some rows of a matrix only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, SupportsInt

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from hpcaccum.accumulator.conditional import Accumulator, Taken
from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.settings import check_sparse_settings
from hpcaccum.accumulator.state import Closed
from hpcaccum.accumulator.storage import RowBuffers, RowGradient
from hpcaccum.arguments import positive_weight, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.device import cupy, current_stream
from hpcaccum.dtypes import Array, quiet
from hpcaccum.mpi import Group, group_of
from hpcaccum.rows import IndexedSlices

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class SparseGradient(NamedTuple):
    """What `SparseConditionalAccumulator.take_grad` returns.

    Attributes:
        indices: The rows that a gradient has: a vector of int64, ascending.
        values: Array with a row for each index.
        shape: Vector of int64: the declared number of rows, -1 if it is unknown; then
            the shape of a row.
    """

    indices: Array
    values: Array
    shape: Array


class SparseConditionalAccumulator(Accumulator):
    """Accumulates gradients that have some rows only, if they are not stale.

    Collective. Steps, receipts, takes and timeouts are those of
    `ConditionalAccumulator`. A gradient is a list of rows with their indices, in any
    order; repeated rows are added. A take returns each row that a gradient contains
    once. With ``"MEAN"`` it divides a row by the number of gradients that contain it,
    or by the sum of their weights, so the other gradients do not reduce rows that few
    gradients contain.

    Each rank stores its rows on its own node, in two buffers, until they are taken.
    They are added in rank order: the same gradients give the same bits in any order of
    arrival.

    Args:
        dtype: float16, float32, float64 or bfloat16. Half precision is summed in
            float32.
        shape: Of the matrix; it may have more dimensions. None or None entries are
            unknown, and () is None. Values may have more dimensions than ``shape``.
        shared_name: If not empty, all accumulators of one communicator with this name
            are one object.
        name: For messages.
        reduction_type: ``"MEAN"`` or ``"SUM"``.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank on whose node is the step.
        capacity: Maximum number of different rows of the gradients of a rank in one
            round. Memory grows with it.
        row_size: Maximum number of elements of a row; by default that of ``shape``,
            and not less.
        workers: How many ranks contribute gradients; see `ConditionalAccumulator`.

    Raises:
        InvalidArgumentError, TypeError: On every rank, for an invalid argument.
        DisagreementError: On every rank, if the ranks' arguments differ.

    Source: the behavior of TensorFlow's ``tf.compat.v1.SparseConditionalAccumulator``,
    which adds unsorted and repeated rows incorrectly.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        shape: int | Sequence[int | None] | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str | None = "MEAN",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        capacity: int | None = None,
        row_size: int | None = None,
        workers: int | None = None,
    ) -> None:
        group = group_of(comm)
        given = dtype, shape, shared_name, reduction_type, host, workers
        super().__init__(
            group,
            name,
            lambda: check_sparse_settings(group.size, given, capacity, row_size),
        )

    def apply_grad(
        self,
        grad_indices: ArrayLike,
        grad_values: ArrayLike,
        grad_shape: Iterable[SupportsIndex] | None = None,
        local_step: SupportsInt = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Add a gradient, unless it is stale.

        Returns as soon as the rows are in place; never waits for another writer. The
        caller's arrays may be changed afterwards.

        Args:
            grad_indices: Vector of integers, in any order, also repeated ones. They
                must be less than a declared number of rows; negative ones are allowed.
            grad_values: A row for each index; any real dtype, converted to the
                accumulator's. Rows on a device (CuPy's) are copied once, by the device,
                or twice if a row is repeated or this rank has gradients in the round.
                See `IndexedSlices`.
            grad_shape: Shape of the whole gradient, compared with the declared one
                only.
            local_step: The step at which the gradient was computed; one number.
            name: Ignored.
            weight: See `ConditionalAccumulator.apply_grad`.

        Returns:
            Whether it was accepted, and the accumulator's step.

        Raises:
            InvalidArgumentError: On this rank, for wrong indices, values, step or
                weight, or more rows than ``capacity``, or if this rank has left;
                nothing is added. Of a stale gradient, only step and weight are checked,
                and that it has a row of numbers for each index.
            TypeError: If ``grad_shape`` does not consist of integers.
            Exception: Anything else, as for `ConditionalAccumulator.apply_grad`.
        """
        grad = IndexedSlices(grad_values, grad_indices, grad_shape)
        return self.apply_indexed_slices_grad(grad, local_step, weight=weight)

    def apply_indexed_slices_grad(
        self,
        grad: IndexedSlices,
        local_step: SupportsInt = 0,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Add a gradient, unless it is stale; see `apply_grad`.

        Raises:
            TypeError: If ``grad`` is not an IndexedSlices.
        """
        self._check_open()
        if not isinstance(grad, IndexedSlices):
            raise TypeError(
                f"gradient must be an IndexedSlices, got {type(grad).__name__}"
            )
        step = step_number(local_step, "local_step")
        number = positive_weight(weight, self._wide)
        return self._shared.writer.submit(RowGradient(grad, self._wide), step, number)

    def take_grad(
        self,
        num_required: SupportsIndex,
        name: str | None = None,
        *,
        timeout: float | None = None,
        on_device: bool = False,
    ) -> SparseGradient:
        """Wait for ``num_required`` gradients; return the reduced rows and reset.

        Errors are those of `ConditionalAccumulator.take_grad`. Gradients without rows
        count, too.

        Args:
            num_required: As there.
            name: Ignored.
            timeout: As there.
            on_device: Whether indices and values are returned on the current device. On
                return they are complete.

        Returns:
            Indices, values and shape; new arrays.

        Raises:
            DeviceUnavailableError: If ``on_device`` is set and there is none; nothing
                is taken.
        """
        taken: Taken[SparseGradient]
        taken = self._take(num_required, None, timeout, on_device)
        return taken.value

    def take(
        self,
        num_required: SupportsIndex,
        *,
        timeout: float | None = None,
        at_least: SupportsIndex | None = None,
        on_device: bool = False,
    ) -> Taken[SparseGradient]:
        """Do as `take_grad`, and return how many gradients the result has.

        ``at_least``, result and errors are those of `ConditionalAccumulator.take`.
        """
        return self._take(num_required, at_least, timeout, on_device)

    def take_indexed_slices_grad(
        self,
        num_required: SupportsIndex,
        name: str | None = None,
        *,
        timeout: float | None = None,
        on_device: bool = False,
    ) -> IndexedSlices:
        """Do as `take_grad`, but return an IndexedSlices."""
        indices, values, shape = self.take_grad(
            num_required, timeout=timeout, on_device=on_device
        )
        return IndexedSlices(values, indices, shape)

    def _check_target(self, target: bool) -> None:
        if target:
            cupy()

    def _reduce(
        self, closed: Closed, target: bool, deadline: Deadline
    ) -> SparseGradient:
        row, storage = closed.shape, self._storage
        assert isinstance(storage, RowBuffers)
        with quiet():
            rows = storage.total_rows(closed, math.prod(row), deadline)
            values = rows.values
            if self._settings.reduction == "MEAN" and (rows.weights != 1).any():
                values = values / rows.weights[:, None].astype(values.dtype)
            # A copy, as those of a single gradient lie in its buffer.
            values = values.astype(self.dtype)
        declared = self._settings.shape or (None,)
        length = -1 if declared[0] is None else declared[0]
        taken = SparseGradient(
            rows.indices.copy(),
            values.reshape(len(values), *row),
            np.array([length, *row], np.int64),
        )
        # If the copy fails, the next take returns these rows.
        return _to_device(taken) if target else taken


def _to_device(taken: SparseGradient) -> SparseGradient:
    arrays = cupy().asarray(taken.indices), cupy().asarray(taken.values)
    current_stream().synchronize()
    return SparseGradient(*arrays, taken.shape)

"""Where a `SparseConditionalAccumulator` stores rows of gradients: `RowSlots`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.batch import Batch
from hpcaccum.accumulator.storage import Slots, Sums, aligned
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.indexed_slices import matrix
from hpcaccum.mpi import without_signals
from hpcaccum.nodes import NodeParts
from hpcaccum.row_sums import Rows, distinct, merged, union_size

if TYPE_CHECKING:
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.deadline import Deadline
    from hpcaccum.indexed_slices import IndexedSlices
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]

_BYTES, _INT64 = np.dtype(np.uint8), np.dtype(np.int64)
# A buffer begins with the number of its rows.
_HEADER = _INT64.itemsize
# Bytes that are fetched from another node before the number of rows is known. Small
# gradients need no more.
_FIRST = 1 << 14


@dataclass(frozen=True)
class RowGradient:
    """A gradient on its way into an accumulator of rows.

    Attributes:
        slices: As the user gave it.
        dtype: Accumulation dtype.
    """

    slices: IndexedSlices
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        shape: tuple[int, ...] = self.slices.values.shape[1:]
        return shape

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows, of which repeated ones are added.

        Values on a device remain there unless a row is repeated: additions on a device
        have no fixed order, so the host makes them.
        """
        slices = self.slices
        indices, values = device.to_host(slices.indices), matrix(slices.values)
        if not slices.on_device:
            return distinct(indices, values, self.dtype)
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        if (ordered[1:] == ordered[:-1]).any():
            return distinct(indices, device.to_host(values), self.dtype)
        if not (order[1:] > order[:-1]).all():
            values = values[device.cupy().asarray(order)]
        return Rows(ordered, np.ones(ordered.size, np.int64), values)


class RowSlots:
    """Two buffers per rank, each with the sum of this rank's gradients in a round.

    A buffer has the number of rows, then their indices, counts and values, one after
    the other. The take adds the rows of all ranks in rank order.

    Args:
        group: The ranks.
        capacity: Maximum number of rows in a buffer.
        row_size: Maximum number of elements of a row.
        dtype: Accumulation dtype.
        what: Name for messages.
    """

    name, sends = "rows", False

    def __init__(
        self,
        group: Group,
        capacity: int,
        row_size: int,
        dtype: np.dtype[Any],
        what: str,
    ) -> None:
        self._rank, self._capacity, self._dtype = group.rank, capacity, dtype
        self._what = what
        self._stride = aligned(_end(capacity, row_size, dtype))
        self._parts = NodeParts(group, 2 * self._stride, what, longest=self._stride)
        # This rank's buffers, after its first gradient from a device.
        self._pinned: device.Pinned | None = None

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's memory that hold gradients."""
        return self._parts.nbytes_here

    def buffer(self, index: int) -> Array:
        """Return this rank's buffer as bytes."""
        return self._view(self._rank, index)

    def _view(self, rank: int, index: int) -> Array:
        return self._parts.view((rank, index * self._stride), self._stride, _BYTES)

    def prepare(self, grad: RowGradient) -> RowGradient:
        """Return the argument for `write`."""
        if grad.slices.on_device and self._pinned is None:
            memory = self._parts.view((self._rank, 0), 2 * self._stride, _BYTES)
            self._pinned = device.Pinned(memory)
        return grad

    def surely_fits(self, index: int, grad: RowGradient) -> bool:
        """Whether a buffer has room for a gradient, also if it has none of its rows."""
        held = _number(self.buffer(index)).item()
        return bool(held + grad.rows.indices.size <= self._capacity)

    def overflow(self, index: int, grad: RowGradient) -> InvalidArgumentError | None:
        """Return the error if a buffer has no room for the rows of one more gradient.

        Args:
            index: A buffer of this rank that has gradients.
            grad: The gradient.
        """
        number = union_size(_indices(self.buffer(index)), grad.rows.indices)
        if number <= self._capacity:
            return None
        return InvalidArgumentError(
            f"{self._what}: the gradients of a rank in one round have at most "
            f"{self._capacity} different rows (capacity=); those of rank {self._rank} "
            f"would have {number}"
        )

    def write(
        self,
        parity: int,
        index: int,
        grad: RowGradient,
        first: bool,
        in_place: bool,
        added: list[None],
    ) -> None:
        """Store a gradient in this rank's buffer, or add it to the sum there.

        See `Slots.write`.
        """
        if added:
            return
        rows, buffer = grad.rows, self.buffer(index)
        width = rows.values.shape[1]
        if not first:
            held = _rows(buffer, width, self._dtype)
            here = rows._replace(values=device.to_host(rows.values))
            rows = merged([held, here])
        number = rows.indices.size
        places = _number(buffer), *_rows(buffer, width, self._dtype, number)
        values: list[Any] = [number, *rows]
        if device.is_device(rows.values):
            # The buffer has nothing yet that this could spoil, if it is interrupted.
            device.copyto(places[-1], values.pop())
        stores = [
            functools.partial(place.__setitem__, ..., value)
            for place, value in zip(places, values, strict=False)
        ]
        without_signals(*stores, functools.partial(added.append, None))

    def total(self, closed: Closed, width: int, deadline: Deadline) -> Rows:
        """Return the sum of a round's gradients; that of one may lie in its buffer.

        Args:
            closed: The round.
            width: Elements of its rows.
            deadline: Of the call. Other nodes have a minute, also if less is left.

        Raises:
            WaitTimeoutError: If other nodes do not send their rows in time.
        """
        buffers = [
            self._view(rank, record.buffer)
            if self._parts.is_here(rank)
            else self._fetch(rank, record.buffer, width, deadline)
            for rank, record in closed.records.items()
        ]
        return merged([_rows(buffer, width, self._dtype) for buffer in buffers])

    def _fetch(self, rank: int, index: int, width: int, deadline: Deadline) -> Array:
        """Return a copy of the part of a buffer on another node that is used."""

        def fetch(begin: int, end: int) -> Array:
            place = rank, index * self._stride + begin
            batch = Batch(self._parts, [place], _BYTES, 1)
            return np.array(batch.collect(end - begin, deadline))

        first = fetch(0, min(_FIRST, self._stride))
        end = _end(_number(first).item(), width, self._dtype)
        if end <= first.size:
            return first
        return np.concatenate([first, fetch(first.size, end)])

    def clear(self, parity: int, size: int) -> None:
        """Do nothing: the first gradient of a round overwrites."""

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._parts.free()


Storage = Slots | Sums | RowSlots


def _end(number: int, width: int, dtype: np.dtype[Any]) -> int:
    """Return the bytes of a buffer that rows take."""
    return _HEADER + number * (2 * _INT64.itemsize + width * dtype.itemsize)


def _number(buffer: Array) -> Array:
    """Return the number of rows in a buffer as an array of shape ()."""
    number: Array = buffer[:_HEADER].view(_INT64).reshape(())
    return number


def _indices(buffer: Array) -> Array:
    end = _HEADER + _number(buffer).item() * _INT64.itemsize
    indices: Array = buffer[_HEADER:end].view(_INT64)
    return indices


def _rows(
    buffer: Array, width: int, dtype: np.dtype[Any], number: int | None = None
) -> Rows:
    """Return the rows in a buffer as views; those that ``number`` rows would have."""
    if number is None:
        number = _number(buffer).item()
    values = _HEADER + 2 * number * _INT64.itemsize
    indices, counts = buffer[_HEADER:values].view(_INT64).reshape(2, number)
    end = _end(number, width, dtype)
    return Rows(indices, counts, buffer[values:end].view(dtype).reshape(number, width))

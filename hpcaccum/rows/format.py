"""Rows of a gradient in memory that ranks share.

A buffer of bytes has the number of rows, then their indices, counts and values, one
after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.rows.sums import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.dtypes import Array

_INT64 = np.dtype(np.int64)
# The number of rows.
_HEADER = _INT64.itemsize


class RowPlace(NamedTuple):
    """The place of a buffer in a vector.

    Attributes:
        name: Of the variable.
        begin, end: Elements of the vector.
        width: Elements of a row.
        capacity: Maximum number of rows.
    """

    name: str
    begin: int
    end: int
    width: int
    capacity: int

    def buffer(self, vector: Array) -> Array:
        """Return the buffer in a vector, as bytes."""
        return vector[self.begin : self.end].view(np.uint8)

    def rows(self, vector: Array) -> Rows:
        """Return the rows in a vector, of its dtype, as views."""
        return rows_in(self.buffer(vector), self.width, vector.dtype)


def nbytes_of(number: int, width: int, dtype: np.dtype[Any]) -> int:
    """Return the bytes of a buffer that rows take."""
    return _HEADER + number * (2 * _INT64.itemsize + width * dtype.itemsize)


def number_in(buffer: Array) -> int:
    """Return the number of rows in a buffer."""
    return int(_number(buffer))


def indices_in(buffer: Array) -> Array:
    """Return the indices of the rows in a buffer, as a view."""
    end = _HEADER + number_in(buffer) * _INT64.itemsize
    indices: Array = buffer[_HEADER:end].view(_INT64)
    return indices


def rows_in(buffer: Array, width: int, dtype: np.dtype[Any]) -> Rows:
    """Return the rows in a buffer, as views."""
    return room_in(buffer, number_in(buffer), width, dtype)


def room_in(buffer: Array, number: int, width: int, dtype: np.dtype[Any]) -> Rows:
    """Return the places of ``number`` rows in a buffer."""
    values = _HEADER + 2 * number * _INT64.itemsize
    indices, counts = buffer[_HEADER:values].view(_INT64).reshape(2, number)
    end = nbytes_of(number, width, dtype)
    return Rows(indices, counts, buffer[values:end].view(dtype).reshape(number, width))


def write_rows(
    buffer: Array,
    rows: Rows,
    dtype: np.dtype[Any],
    copyto: Callable[[Array, Any], object] = np.copyto,
) -> None:
    """Write rows to a buffer; ``copyto`` copies the values, maybe from a device."""
    number, width = rows.values.shape
    room = room_in(buffer, number, width, dtype)
    _number(buffer)[...] = number
    room.indices[...], room.counts[...] = rows.indices, rows.counts
    copyto(room.values, rows.values)


def remove_rows(buffer: Array) -> None:
    """Remove all rows from a buffer."""
    _number(buffer)[...] = 0


def overflow(
    what: str, rank: int, number: int, capacity: int
) -> InvalidArgumentError | None:
    """Return the error if the gradients of a rank in a round have too many rows."""
    if number <= capacity:
        return None
    return InvalidArgumentError(
        f"{what}: the gradients of a rank in one round have at most {capacity} "
        f"different rows (capacity=); those of rank {rank} would have {number}"
    )


def _number(buffer: Array) -> Array:
    """Return the number of rows in a buffer as an array of shape ()."""
    number: Array = buffer[:_HEADER].view(_INT64).reshape(())
    return number

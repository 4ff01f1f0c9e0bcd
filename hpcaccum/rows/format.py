"""How rows lie in memory: their indices, their weights if these matter, their values.

The number of rows lies elsewhere, or before them: at a `RowPlace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.layout import ALIGNMENT
from hpcaccum.rows.sums import Rows

_INT64 = np.dtype(np.int64)


class RowFormat(NamedTuple):
    """How at most `capacity` rows of a matrix lie in bytes.

    A row has `width` elements. If not `weighted`, no weights are stored, and each is 1.
    """

    capacity: int
    width: int
    dtype: np.dtype[Any]
    weighted: bool = False

    def nbytes(self, number: int) -> int:
        """Return the size of so many rows: whole cache lines."""
        numbers = (2 if self.weighted else 1) * _INT64.itemsize
        size = number * (numbers + self.width * self.dtype.itemsize)
        return -(-size // ALIGNMENT) * ALIGNMENT

    def rows(self, memory: Array, number: int) -> Rows:
        """Return so many rows at the begin of memory, as views."""
        begin = number * _INT64.itemsize
        indices = memory[:begin].view(_INT64)
        if self.weighted:
            weights = memory[begin : 2 * begin].view(np.float64)
            begin *= 2
        else:
            weights = np.ones(number)
        end = begin + number * self.width * self.dtype.itemsize
        values = memory[begin:end].view(self.dtype).reshape(number, self.width)
        return Rows(indices, weights, values)

    def write(
        self,
        memory: Array,
        rows: Rows,
        copyto: Callable[[Array, Any], object] = np.copyto,
    ) -> None:
        """Write rows; ``copyto`` copies the values, maybe from a device."""
        room = self.rows(memory, rows.indices.size)
        room.indices[...] = rows.indices
        if self.weighted:
            room.weights[...] = rows.weights
        copyto(room.values, rows.values)


def divided(
    memory: Array, formats: Mapping[str, RowFormat], numbers: Mapping[str, int]
) -> dict[str, Array]:
    """Return the memory of the rows of each name, in the order of the formats."""
    found, begin = {}, 0
    for name, form in formats.items():
        if name in numbers:
            end = begin + form.nbytes(numbers[name])
            found[name] = memory[begin:end]
            begin = end
    return found


class RowPlace(NamedTuple):
    """A place in a vector for rows of a variable and, before them, their number.

    `begin` is its first element. The dtype of `form` is that of the vector.
    """

    name: str
    begin: int
    form: RowFormat

    @property
    def end(self) -> int:
        """Element of the vector after the place."""
        nbytes = ALIGNMENT + self.form.nbytes(self.form.capacity)
        return self.begin + nbytes // self.form.dtype.itemsize

    def used(self, buffer: Array) -> int:
        """Return how many bytes of a buffer are in use."""
        return ALIGNMENT + self.form.nbytes(int(_number(buffer)))

    def read(self, buffer: Array) -> Rows:
        """Return the rows in a buffer, as views."""
        return self.form.rows(buffer[ALIGNMENT:], int(_number(buffer)))

    def rows(self, vector: Array) -> Rows:
        """Return the rows in a vector, as views."""
        return self.read(vector[self.begin : self.end].view(np.uint8))

    def write(
        self,
        vector: Array,
        rows: Rows | None,
        copyto: Callable[[Array, Any], object] = np.copyto,
    ) -> None:
        """Write rows, None for none, to a vector; see `RowFormat.write`."""
        buffer = vector[self.begin : self.end].view(np.uint8)
        _number(buffer)[...] = 0 if rows is None else rows.indices.size
        if rows is not None:
            self.form.write(buffer[ALIGNMENT:], rows, copyto)


def _number(buffer: Array) -> Array:
    """Return the number of rows in a buffer as an array of shape ()."""
    number: Array = buffer[: _INT64.itemsize].view(_INT64).reshape(())
    return number

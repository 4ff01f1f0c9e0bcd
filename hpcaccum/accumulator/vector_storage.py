"""Where gradients are stored that are vectors with rows at their end: `VectorSlots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.storage import Slots
from hpcaccum.rows import (
    RowPlace,
    indices_in,
    merged,
    number_in,
    overflow,
    union_size,
    write_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.errors import InvalidArgumentError
    from hpcaccum.mpi import Group


class VectorSlots(Slots):
    """`Slots` of vectors that begin with numbers and end with rows.

    If a rank has several gradients in a round, the numbers are added element by
    element, and the rows by their indices. What takes the vectors adds those of
    different ranks.

    Args:
        group, root, capacity, dtype, what: As for `Slots`.
        rows: The places of rows in a vector.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        capacity: int,
        dtype: np.dtype[Any],
        what: str,
        rows: Sequence[RowPlace],
    ) -> None:
        super().__init__(group, root, capacity, dtype, what)
        self._rows = rows

    def surely_fits(self, index: int, grad: Array) -> bool:
        """Whether a buffer has room for a gradient, even if it has none of its rows."""
        held = self.buffer(index)
        return all(
            number_in(each.buffer(held)) + number_in(each.buffer(grad)) <= each.capacity
            for each in self._rows
        )

    def overflow(self, index: int, grad: Array) -> InvalidArgumentError | None:
        """Return the error if a buffer has no room for the rows of another gradient."""
        held = self.buffer(index)
        for each in self._rows:
            both = (indices_in(each.buffer(vector)) for vector in (held, grad))
            what, number = f"gradients of {each.name!r}", union_size(*both)
            if error := overflow(what, self._rank, number, each.capacity):
                return error
        return None

    def _add(self, place: Array, grad: Array) -> None:
        """Add a vector to a sum, which has room for its rows."""
        end = self._rows[0].begin
        super()._add(place[:end], grad[:end])
        for each in self._rows:
            rows = merged([each.rows(place), each.rows(grad)])
            write_rows(each.buffer(place), rows, self._dtype)

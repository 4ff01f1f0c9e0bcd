"""Where gradients are stored that are vectors with rows at their end: `VectorSlots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.storage import Slots
from hpcaccum.rows import RowPlace, merged, overflow, union_size

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
            each.rows(held).indices.size + each.rows(grad).indices.size
            <= each.form.capacity
            for each in self._rows
        )

    def overflow(self, index: int, grad: Array) -> InvalidArgumentError | None:
        """Return the error if a buffer has no room for the rows of another gradient."""
        held = self.buffer(index)
        for each in self._rows:
            number = union_size(each.rows(held).indices, each.rows(grad).indices)
            what, capacity = f"gradients of {each.name!r}", each.form.capacity
            if error := overflow(what, self._rank, number, capacity):
                return error
        return None

    def _add(self, place: Array, grad: Array) -> None:
        """Add a vector to a sum, which has room for its rows."""
        end = self._rows[0].begin
        super()._add(place[:end], grad[:end])
        for each in self._rows:
            each.write(place, merged([each.rows(place), each.rows(grad)]))

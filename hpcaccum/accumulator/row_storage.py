"""Where a `SparseConditionalAccumulator` stores rows of gradients: `RowSlots`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.storage import Slots
from hpcaccum.rows import RowFormat, RowPlace, Rows, matrix, merged, rows_of, weighted
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from hpcaccum.accumulator.state import Closed, Record
    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group
    from hpcaccum.rows import IndexedSlices


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
        if not slices.on_device:
            return rows_of(slices, self.dtype)
        indices, values = device.to_host(slices.indices), matrix(slices.values)
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        if (ordered[1:] == ordered[:-1]).any():
            return rows_of(slices, self.dtype)
        if not (order[1:] > order[:-1]).all():
            values = values[device.cupy().asarray(order)]
        return Rows(ordered, np.ones(ordered.size), values)


class RowSlots(Slots):
    """`Slots` of gradients that are rows only, of any width up to a maximum.

    Args:
        group, root: As for `Slots`.
        capacity: Maximum number of rows in a buffer.
        row_size: Maximum number of elements of a row.
        dtype, what: As for `Slots`.
    """

    name = "rows"

    def __init__(
        self,
        group: Group,
        root: int,
        capacity: int,
        row_size: int,
        dtype: np.dtype[Any],
        what: str,
    ) -> None:
        self._what = what
        self._whole = RowPlace("rows", 0, RowFormat(capacity, row_size, dtype, True))
        super().__init__(group, root, self._whole.end, dtype, what)
        # Nobody adds them element by element.
        self.parts.sends_short = False

    def _of_width(self, width: int) -> RowPlace:
        """Return the place of rows of so many elements."""
        return self._whole._replace(form=self._whole.form._replace(width=width))

    def _rows_of(self, grad: RowGradient) -> list[tuple[RowPlace, Rows]]:
        return [(self._whole, grad.rows)]

    def _label(self, place: RowPlace) -> str:
        return self._what

    def prepare(self, grad: RowGradient, weight: float) -> RowGradient:
        """Return the argument for `write`."""
        if grad.slices.on_device:
            self.pin()
        return grad

    @traced("copy")
    def write(
        self,
        parity: int,
        index: int,
        grad: RowGradient,
        weight: float,
        before: Record | None,
    ) -> None:
        """Store a gradient in this rank's buffer, or add it to the sum there.

        See `Slots.write`.
        """
        rows, buffer = grad.rows, self.buffer(index)
        place = self._of_width(rows.values.shape[1])
        if before is not None:
            here = rows._replace(values=device.to_host(rows.values))
            had = weighted(place.rows(buffer), before.factor)
            rows = merged([had, weighted(here, weight)])
        place.write(buffer, rows, device.copyto)

    def total_rows(self, closed: Closed, width: int, deadline: Deadline) -> Rows:
        """Return the sum of a round's gradients; that of one may lie in its buffer."""
        return merged(self.batch(closed, 1).rows(self._of_width(width), deadline))

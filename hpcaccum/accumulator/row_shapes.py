"""Which gradients of rows fit an accumulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.accumulator.declared_shape import (
    MAX_DIMS,
    PartialShape,
    Shape,
    compatible,
    size_of,
)
from hpcaccum.accumulator.shapes import ShapePolicy, ShapeTable
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hpcaccum.accumulator.row_storage import RowGradient
    from hpcaccum.accumulator.settings import Settings


class RowShapes(ShapePolicy):
    """The first gradient of a round fixes the shape of a row for that round.

    Values may have more dimensions than the declared shape. No shape, and shape (),
    admit all values.

    Args:
        settings: Of the accumulator.
        what: Name for messages.
        table: The numbers of the shapes.
    """

    def __init__(self, settings: Settings, what: str, table: ShapeTable) -> None:
        super().__init__(settings, what)
        self._table = table
        self._declared: PartialShape = settings.shape or ()

    def number(self, grad: RowGradient, of_round: int) -> int | None:
        """Return the number of the shape of a row; None if it does not fit."""
        if self._reason(grad, of_round):
            return None
        return of_round or self._table.number(grad.shape)

    def shape(self, number: int) -> Shape:
        """Return the shape of a row, by its number."""
        return self._table.shape(number)

    def misfit(self, grad: RowGradient, of_round: int) -> InvalidArgumentError:
        """Return the error for a gradient that has no number."""
        reason = self._reason(grad, of_round)
        if reason is None:
            return self._table.full()
        return InvalidArgumentError(f"{self._what}: {reason}")

    def _reason(self, grad: RowGradient, of_round: int) -> str | None:
        """Return why a gradient does not fit; None if it does."""
        return (
            self._wrong_dense_shape(grad)
            or self._wrong_index(grad)
            or self._wrong_row(grad, of_round)
            or self._too_many(grad)
        )

    def _wrong_dense_shape(self, grad: RowGradient) -> str | None:
        shape = grad.slices.dense_shape
        if shape is None or self._begins_as_declared(shape):
            return None
        return f"dense_shape must begin with {self._declared}, got {shape}"

    def _begins_as_declared(self, shape: Shape) -> bool:
        return compatible(shape[: len(self._declared)], self._declared)

    def _wrong_index(self, grad: RowGradient) -> str | None:
        rows = self._declared[0] if self._declared else None
        indices = grad.rows.indices
        if rows is None or not indices.size or indices[-1] < rows:
            return None
        return f"indices must be less than {rows}, got {indices[-1]}"

    def _wrong_row(self, grad: RowGradient, of_round: int) -> str | None:
        row, declared = grad.shape, self._declared[1:]
        if of_round:
            expected = self._table.shape(of_round)
            if row == expected:
                return None
            return f"rows must be {expected}, like the others of this round, got {row}"
        if not compatible(row[: len(declared)], declared):
            return f"rows must begin with {declared}, got {row}"
        if len(row) > MAX_DIMS:
            return f"rows must have at most {MAX_DIMS} dimensions, got {row}"
        return None

    def _too_many(self, grad: RowGradient) -> str | None:
        settings, number = self._settings, grad.rows.indices.size
        if size_of(grad.shape) > settings.row_size:
            return (
                f"rows must have at most {settings.row_size} elements (row_size=), "
                f"got {grad.shape}"
            )
        if number > settings.capacity:
            return (
                f"a gradient must have at most {settings.capacity} different "
                f"rows (capacity=), got {number}"
            )
        return None

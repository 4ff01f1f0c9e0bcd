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
from hpcaccum.accumulator.shapes import Offer, ShapePerRound, ShapeTable

if TYPE_CHECKING:
    from hpcaccum.accumulator.row_storage import RowGradient
    from hpcaccum.accumulator.settings import Settings


class RowShapes(ShapePerRound):
    """The first gradient of a round fixes the shape of a row for that round.

    Values may have more dimensions than the declared shape. No shape, and shape (),
    admit all values.

    Args:
        settings: Of the accumulator.
        what: Name for messages.
        table: The numbers of the shapes.
    """

    def __init__(self, settings: Settings, what: str, table: ShapeTable) -> None:
        super().__init__(settings, what, table)
        self._declared: PartialShape = settings.shape or ()

    def offer(self, grad: RowGradient) -> Offer:
        """Return what the admission knows of a gradient."""
        reason = (
            self._wrong_dense_shape(grad)
            or self._wrong_index(grad)
            or self._wrong_row(grad.shape)
            or self._too_many(grad)
        )
        return Offer(grad.shape, reason)

    def _unlike(self, expected: Shape, shape: Shape) -> str:
        return f"rows must be {expected}, like the others of this round, got {shape}"

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

    def _wrong_row(self, row: Shape) -> str | None:
        declared = self._declared[1:]
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

"""Which shapes gradients may have, and numbers for shapes that all ranks understand."""

from __future__ import annotations

import math
from typing import Any

from hpcaccum.accumulator.settings import (
    MAX_DIMS,
    Settings,
    Shape,
    compatible,
    declared_shape,
    is_fixed,
    known,
)
from hpcaccum.accumulator.storage import RowGradient
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import AtomicWords


class Shapes:
    """Which shapes the gradients of an accumulator may have.

    If the declared shape is not fixed, the first gradient of a round fixes the shape of
    that round. STATE and the records name a shape by its number in ``table``. Number 0
    in STATE means that the round has no shape yet, or that all rounds have the same.

    Attributes:
        only: The shape of every round; None if rounds differ.
    """

    def __init__(self, settings: Settings, what: str, table: ShapeTable) -> None:
        self._settings, self._what, self._table = settings, what, table
        self.only = known(settings.shape) if settings.has_one_shape else None

    def misfit(self, grad: Any) -> str | None:
        """Return why a gradient fits no round; None if it may fit one."""
        shape, declared = grad.shape, self._settings.shape
        if not compatible(shape, declared):
            expected = f"shape {declared}"
        elif len(shape) > MAX_DIMS:
            expected = f"at most {MAX_DIMS} dimensions"
        elif math.prod(shape) > self._settings.capacity:
            expected = f"at most {self._settings.capacity} elements"
        else:
            return None
        return f"gradient must have {expected}, got shape {shape}"

    def number(self, shape: Shape, misfit: str | None, of_round: int) -> int:
        """Return the number of a gradient's shape, if it fits a round of one."""
        if of_round and shape != (expected := self._table.shape(of_round)):
            misfit = self._unlike(expected, shape)
        if misfit is not None:
            raise InvalidArgumentError(f"{self._what}: {misfit}")
        return of_round or self._table.number(shape)

    def _unlike(self, expected: Shape, shape: Shape) -> str:
        """Return why a shape does not fit a round."""
        others = "like the others of this round"
        return f"gradient must have shape {expected}, {others}, got shape {shape}"

    def shape(self, number: int) -> Shape:
        """Return the shape of a number."""
        return self._table.shape(number) if self.only is None else self.only

    def slot_shape(self, shape: Any) -> Shape:
        """Return the shape of a slot; None is the declared one, if that is fixed."""
        if shape is None and self.only is not None:
            return self.only
        settings, wanted = self._settings, declared_shape(shape)
        if not is_fixed(wanted):
            raise InvalidArgumentError(
                f"{self._what}: slot needs a shape, because that of the accumulator "
                f"is {settings.shape}"
            )
        fixed = known(wanted)
        fits = compatible(fixed, settings.shape)
        if not fits or math.prod(fixed) > settings.capacity:
            raise InvalidArgumentError(
                f"{self._what}: slot must have shape {settings.shape} and at most "
                f"{settings.capacity} elements, got {wanted}"
            )
        return fixed


class RowShapes(Shapes):
    """The first gradient of a round fixes the shape of a row for that round.

    Values may have more dimensions than the declared shape. No shape, and shape (),
    admit all values.
    """

    def misfit(self, grad: RowGradient) -> str | None:
        """See `Shapes.misfit`; ``grad.shape`` is that of a row."""
        settings, declared = self._settings, self._settings.shape or ()
        dense, indices = grad.slices.dense_shape, grad.rows.indices
        row, width = grad.shape, declared[1:]
        if dense is not None and not compatible(dense[: len(declared)], declared):
            return f"dense_shape must begin with {declared}, got {dense}"
        rows = declared[0] if declared else None
        if rows is not None and indices.size and indices[-1] >= rows:
            return f"indices must be less than {rows}, got {indices[-1]}"
        if not compatible(row[: len(width)], width):
            return f"rows must begin with {width}, got {row}"
        if len(row) > MAX_DIMS:
            return f"rows must have at most {MAX_DIMS} dimensions, got {row}"
        if math.prod(row) > settings.row_size:
            return (
                f"rows must have at most {settings.row_size} elements (row_size=), "
                f"got {row}"
            )
        if indices.size > settings.capacity:
            return (
                f"a gradient must have at most {settings.capacity} different "
                f"rows (capacity=), got {indices.size}"
            )
        return None

    def _unlike(self, expected: Shape, shape: Shape) -> str:
        return f"rows must be {expected}, like the others of this round, got {shape}"


class ShapeTable:
    """Shapes that ranks have used, numbered from 1, in words that all ranks reach.

    A rank that needs a number searches the entries for the shape. If there is none, it
    reserves the next entry, fills it, and only then uses the number: no rank waits for
    another. Two ranks that do so at the same time give one shape two numbers, hence
    shapes are compared, never numbers. There are at most ``limit`` entries.
    """

    _WIDTH = 1 + MAX_DIMS

    def __init__(self, words: AtomicWords, base: int, limit: int) -> None:
        self._words, self._base, self._limit = words, base, limit
        self._shapes: dict[int, Shape] = {}
        self._numbers: dict[Shape, int] = {}

    @classmethod
    def words(cls, limit: int) -> int:
        """Return the number of words for ``limit`` entries."""
        return 1 + limit * cls._WIDTH

    def shape(self, number: int) -> Shape:
        """Return the shape of a number that is in use."""
        if number not in self._shapes:
            words = self._words.read_range(self._entry(number), self._WIDTH)
            self._remember(number, tuple(words[1 : words[0]]))
        return self._shapes[number]

    def number(self, shape: Shape) -> int:
        """Return a number for a shape."""
        if shape not in self._numbers:
            # Other ranks may have filled entries. The first word is written last.
            used = min(self._words.read(self._base), self._limit)
            for number in {*range(1, used + 1)} - self._shapes.keys():
                if self._words.read(self._entry(number)):
                    self.shape(number)
        if shape in self._numbers:
            return self._numbers[shape]
        number = self._words.fetch_add(self._base, 1) + 1
        if number > self._limit:
            raise InvalidArgumentError(
                f"more than {self._limit} different shapes in one accumulator"
            )
        entry = self._entry(number)
        if shape:
            self._words.store(entry + 1, shape)
        # Last, and never 0: a rank that reads it can read the shape.
        self._words.write(entry, 1 + len(shape))
        self._remember(number, shape)
        return number

    def _entry(self, number: int) -> int:
        return self._base + 1 + (number - 1) * self._WIDTH

    def _remember(self, number: int, shape: Shape) -> None:
        self._shapes[number] = shape
        self._numbers.setdefault(shape, number)

"""What a gradient's shape may be, and numbers for shapes that ranks agree on."""

from __future__ import annotations

import math
import numbers
import operator
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.mpi import AtomicWords

Shape = tuple[int, ...]
PartialShape = tuple["int | None", ...]

MAX_DIMS = 16


def declared_shape(shape: Any) -> PartialShape | None:
    """Return a declared shape as a tuple; None entries and None itself are unknown.

    Raises:
        TypeError: If it is no integer, list or tuple.
        InvalidArgumentError: If a dimension is negative, or there are too many.
    """
    if shape is None:
        return None
    if isinstance(shape, numbers.Integral) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"shape must be a list, a tuple or None, got {shape!r}")
    dims = tuple(None if dim is None else operator.index(dim) for dim in shape)
    if any(dim is not None and dim < 0 for dim in dims):
        raise InvalidArgumentError(f"shape must have no negative dimension, got {dims}")
    if len(dims) > MAX_DIMS:
        raise InvalidArgumentError(f"shape has {len(dims)} dimensions, at most 16")
    return dims


def is_fixed(declared: PartialShape | None) -> bool:
    """Whether every dimension is known."""
    return declared is not None and None not in declared


def known(shape: PartialShape | None) -> Shape:
    """Return a shape of which every dimension is known."""
    return tuple(dim for dim in shape or () if dim is not None)


def size_of(shape: Sequence[int | None]) -> int:
    """Return the number of elements of a fixed shape."""
    return math.prod(dim for dim in shape if dim is not None)


def compatible(shape: Shape, declared: PartialShape | None) -> bool:
    """Whether a shape fits a declared one; there is no broadcasting."""
    if declared is None:
        return True
    return len(shape) == len(declared) and all(
        want is None or have == want for have, want in zip(shape, declared, strict=True)
    )


class ShapeTable:
    """Shapes that ranks have used, numbered from 1, in the host's words.

    A rank that needs a number looks for the shape among the entries. If there is none,
    it takes the next entry for itself alone, fills it and only then uses the number:
    nobody waits for anybody. Two ranks that do so at the same time give one shape two
    numbers, hence shapes are compared, never numbers.

    Args:
        words: Where the table is.
        base: Index of its first cell; it takes ``ShapeTable.words(limit)``.
        limit: Most entries.
    """

    _WIDTH = 1 + MAX_DIMS

    def __init__(self, words: AtomicWords, base: int, limit: int) -> None:
        self._words, self._base, self._limit = words, base, limit
        self._shapes: dict[int, Shape] = {}
        self._numbers: dict[Shape, int] = {}
        # How many entries were looked at, and which of them were not filled then.
        self._seen = 0
        self._unfilled: list[int] = []

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
        """Return a number for a shape.

        Raises:
            InvalidArgumentError: If the table is full.
        """
        if shape not in self._numbers:
            self._look()
        if shape not in self._numbers:
            self._enter(shape)
        return self._numbers[shape]

    def _look(self) -> None:
        """Read the entries that others have filled."""
        used = min(self._words.read(self._base), self._limit)
        unfilled = []
        for number in [*self._unfilled, *range(self._seen + 1, used + 1)]:
            # Once the first word is there, the others are; see `_enter`.
            if self._words.read(self._entry(number)):
                self.shape(number)
            else:
                unfilled.append(number)
        self._seen, self._unfilled = used, unfilled

    def _enter(self, shape: Shape) -> None:
        number = self._words.fetch_add(self._base, 1) + 1
        if number > self._limit:
            raise InvalidArgumentError(
                f"more than {self._limit} different shapes in one accumulator"
            )
        entry = self._entry(number)
        if shape:
            self._words.write_range(entry + 1, shape)
        # Last, and never 0: a rank that reads it can read the shape.
        self._words.write(entry, 1 + len(shape))
        self._remember(number, shape)

    def _entry(self, number: int) -> int:
        return self._base + 1 + (number - 1) * self._WIDTH

    def _remember(self, number: int, shape: Shape) -> None:
        self._shapes[number] = shape
        self._numbers.setdefault(shape, number)

"""Which shapes gradients may have, and numbers for shapes that all ranks understand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator.declared_shape import (
    MAX_DIMS,
    Shape,
    compatible,
    declared_shape,
    is_fixed,
    known,
    size_of,
)
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hpcaccum.accumulator.settings import Settings
    from hpcaccum.mpi import AtomicWords


class ShapePolicy:
    """Which shapes the gradients of an accumulator may have.

    STATE and the records name a shape by its number. Number 0 in STATE means that the
    round has no shape yet, or that all rounds have the same one.

    Args:
        settings: Of the accumulator.
        what: Name for messages.

    Attributes:
        only: The shape of every round; None if rounds differ.
    """

    only: Shape | None = None

    def __init__(self, settings: Settings, what: str) -> None:
        self._settings, self._what = settings, what

    def number(self, grad: Any, of_round: int) -> int | None:
        """Return the number of a gradient's shape; None if it does not fit.

        Args:
            grad: The gradient.
            of_round: Number of the round's shape.
        """
        raise NotImplementedError

    def shape(self, number: int) -> Shape:
        """Return the shape of a number."""
        raise NotImplementedError

    def misfit(self, grad: Any, of_round: int) -> InvalidArgumentError:
        """Return the error for a gradient that has no number."""
        return InvalidArgumentError(
            f"{self._what}: gradient must have {self._expected(grad, of_round)}, got "
            f"shape {grad.shape}"
        )

    def _expected(self, grad: Any, of_round: int) -> str:
        return f"shape {self._settings.shape}"

    def slot_shape(self, shape: Any) -> Shape:
        """Return the shape of a slot."""
        settings, wanted = self._settings, declared_shape(shape)
        if wanted is None or not is_fixed(wanted):
            raise InvalidArgumentError(
                f"{self._what}: slot needs a shape, because that of the accumulator "
                f"is {settings.shape}"
            )
        fits = compatible(known(wanted), settings.shape)
        if not fits or size_of(wanted) > settings.capacity:
            raise InvalidArgumentError(
                f"{self._what}: slot must have shape {settings.shape} and at most "
                f"{settings.capacity} elements, got {wanted}"
            )
        return known(wanted)


class FixedShape(ShapePolicy):
    """All gradients have the declared shape."""

    only: Shape

    def __init__(self, settings: Settings, what: str) -> None:
        super().__init__(settings, what)
        self.only = known(settings.shape)

    def number(self, grad: Any, of_round: int) -> int | None:
        """Return 0 for the declared shape."""
        return 0 if grad.shape == self.only else None

    def shape(self, number: int) -> Shape:
        """Return the declared shape."""
        return self.only

    def slot_shape(self, shape: Any) -> Shape:
        """Return the shape of a slot; None is the declared one."""
        return self.only if shape is None else super().slot_shape(shape)


class ShapePerRound(ShapePolicy):
    """The first gradient of a round fixes the shape of that round.

    Args:
        settings: Of the accumulator.
        what: Name for messages.
        table: The numbers of the shapes.
    """

    def __init__(self, settings: Settings, what: str, table: ShapeTable) -> None:
        super().__init__(settings, what)
        self._table = table

    def number(self, grad: Any, of_round: int) -> int | None:
        """Return the number of a gradient's shape; None if it does not fit."""
        shape = grad.shape
        if of_round:
            return of_round if shape == self._table.shape(of_round) else None
        return self._table.number(shape) if self._is_declared(shape) else None

    def _is_declared(self, shape: Shape) -> bool:
        return (
            len(shape) <= MAX_DIMS
            and size_of(shape) <= self._settings.capacity
            and compatible(shape, self._settings.shape)
        )

    def shape(self, number: int) -> Shape:
        """Return the shape of a number."""
        return self._table.shape(number)

    def misfit(self, grad: Any, of_round: int) -> InvalidArgumentError:
        """Return the error for a gradient that has no number."""
        if not of_round and self._is_declared(grad.shape):
            return self._table.full()
        return super().misfit(grad, of_round)

    def _expected(self, grad: Any, of_round: int) -> str:
        if of_round:
            shape = self._table.shape(of_round)
            return f"shape {shape}, like the others of this round"
        if not compatible(grad.shape, self._settings.shape):
            return super()._expected(grad, of_round)
        if grad.ndim > MAX_DIMS:
            return f"at most {MAX_DIMS} dimensions"
        return f"at most {self._settings.capacity} elements"


class ShapeTable:
    """Shapes that ranks have used, numbered from 1, in words that all ranks reach.

    A rank that needs a number searches the entries for the shape. If there is none, it
    reserves the next entry, fills it, and only then uses the number: no rank waits for
    another. Two ranks that do so at the same time give one shape two numbers, hence
    shapes are compared, never numbers.

    Args:
        words: The words.
        base: Index of the first of ``ShapeTable.words(limit)`` words.
        limit: Maximum number of entries.
    """

    _WIDTH = 1 + MAX_DIMS

    def __init__(self, words: AtomicWords, base: int, limit: int) -> None:
        self._words, self._base, self._limit = words, base, limit
        self._shapes: dict[int, Shape] = {}
        self._numbers: dict[Shape, int] = {}
        # How many entries were read, and which of them were not filled then.
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

    def number(self, shape: Shape) -> int | None:
        """Return a number for a shape; None if it has none and the table is full."""
        if shape not in self._numbers:
            self._read_new()
        if shape not in self._numbers:
            self._add(shape)
        return self._numbers.get(shape)

    def full(self) -> InvalidArgumentError:
        """Return the error for a shape that has no number."""
        return InvalidArgumentError(
            f"more than {self._limit} different shapes in one accumulator"
        )

    def _read_new(self) -> None:
        """Read the entries that other ranks have filled."""
        used = min(self._words.read(self._base), self._limit)
        unfilled = []
        for number in [*self._unfilled, *range(self._seen + 1, used + 1)]:
            # The first word of an entry is written last; see `_add`.
            if self._words.read(self._entry(number)):
                self.shape(number)
            else:
                unfilled.append(number)
        self._seen, self._unfilled = used, unfilled

    def _add(self, shape: Shape) -> None:
        number = self._words.fetch_add(self._base, 1) + 1
        if number > self._limit:
            return
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

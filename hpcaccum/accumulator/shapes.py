"""Which shapes gradients may have, and numbers for shapes that all ranks understand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.accumulator.settings import (
    MAX_DIMS,
    PartialShape,
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
    from hpcaccum.accumulator.storage import RowGradient
    from hpcaccum.mpi import AtomicWords


class Offer(NamedTuple):
    """What the admission knows of a gradient.

    Attributes:
        shape: Of the gradient; of a row, if it has rows only.
        misfit: Why it fits no round; None if it may fit one.
    """

    shape: Shape
    misfit: str | None


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

    def offer(self, grad: Any) -> Offer:
        """Return what the admission knows of a gradient."""
        expected = self._expected(grad)
        if expected is not None:
            expected = f"gradient must have {expected}, got shape {grad.shape}"
        return Offer(grad.shape, expected)

    def _expected(self, grad: Any) -> str | None:
        """Return what a gradient must have to fit a round; None if it has that."""
        raise NotImplementedError

    def number(self, offer: Offer, of_round: int) -> int | None:
        """Return the number of a gradient's shape; None if it does not fit.

        Args:
            offer: The gradient.
            of_round: Number of the round's shape.
        """
        raise NotImplementedError

    def shape(self, number: int) -> Shape:
        """Return the shape of a number."""
        raise NotImplementedError

    def misfit(self, offer: Offer, of_round: int) -> InvalidArgumentError:
        """Return the error for a gradient that has no number."""
        return InvalidArgumentError(f"{self._what}: {offer.misfit}")

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

    def _expected(self, grad: Any) -> str | None:
        return None if grad.shape == self.only else f"shape {self._settings.shape}"

    def number(self, offer: Offer, of_round: int) -> int | None:
        """Return 0 for the declared shape."""
        return None if offer.misfit else 0

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

    def _expected(self, grad: Any) -> str | None:
        settings, shape = self._settings, grad.shape
        if not compatible(shape, settings.shape):
            return f"shape {settings.shape}"
        if len(shape) > MAX_DIMS:
            return f"at most {MAX_DIMS} dimensions"
        if size_of(shape) > settings.capacity:
            return f"at most {settings.capacity} elements"
        return None

    def number(self, offer: Offer, of_round: int) -> int | None:
        """Return the number of a gradient's shape; None if it does not fit."""
        if of_round:
            same = offer.shape == self._table.shape(of_round)
            return of_round if same and not offer.misfit else None
        return None if offer.misfit else self._table.number(offer.shape)

    def shape(self, number: int) -> Shape:
        """Return the shape of a number."""
        return self._table.shape(number)

    def misfit(self, offer: Offer, of_round: int) -> InvalidArgumentError:
        """Return the error for a gradient that has no number."""
        if of_round and offer.shape != (expected := self._table.shape(of_round)):
            offer = offer._replace(misfit=self._unlike(expected, offer.shape))
        if not offer.misfit:
            return self._table.full()
        return super().misfit(offer, of_round)

    def _unlike(self, expected: Shape, shape: Shape) -> str:
        """Return why a shape does not fit a round."""
        others = "like the others of this round"
        return f"gradient must have shape {expected}, {others}, got shape {shape}"


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
            self._words.store(entry + 1, shape)
        # Last, and never 0: a rank that reads it can read the shape.
        self._words.write(entry, 1 + len(shape))
        self._remember(number, shape)

    def _entry(self, number: int) -> int:
        return self._base + 1 + (number - 1) * self._WIDTH

    def _remember(self, number: int, shape: Shape) -> None:
        self._shapes[number] = shape
        self._numbers.setdefault(shape, number)

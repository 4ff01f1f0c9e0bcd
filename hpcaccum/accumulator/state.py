"""The words of the admission protocol: their fields, packed into 64 bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcaccum.accumulator.settings import Shape

# Gradients of one rank in one round: 20 bits. Then the number of a shape.
_MAX_NUMBER, _MAX_SHAPE = (1 << 20) - 1, (1 << 10) - 1
# 64 bytes on every processor that is common in clusters.
_WORDS_PER_LINE = 8


def admits(step: Any, local_step: Any, max_lag: float = 0) -> Any:
    """Whether a gradient of ``local_step`` counts at ``step``; also for arrays."""
    return step - local_step <= max_lag


class State(NamedTuple):
    """The word STATE, which decides about admission.

    Attributes:
        step: The accumulator's step.
        shape: Number of the shape that the round has; 0 while it has none.
        parity: Of the open round.
        waiting: Whether a take waits for more gradients.
        number: Gradients admitted to the round; if ``waiting``, those still missing.
    """

    step: int
    shape: int
    parity: int
    waiting: int
    number: int

    def admitted(self, shape: int) -> State:
        """Return the state after one more gradient; the last missing one closes."""
        step, _, parity, waiting, number = self
        if not waiting:
            return State(step, shape, parity, 0, number + 1)
        if number > 1:
            return State(step, shape, parity, 1, number - 1)
        return self.closed()

    def closed(self) -> State:
        """Return the state after the round is closed."""
        return State(self.step + 1, 0, 1 - self.parity, 0, 0)


class Packing:
    """The layout of a `State` in 64 bits: step, shape, parity, waiting, number.

    Attributes:
        max_count: Maximum number of gradients in one round.
        max_step: Steps are between ``-max_step - 1`` and ``max_step``.
        max_first_step: Those that can be set are up to this one, and from its negative.
        max_shapes: Maximum number of different shapes; 0 if the shape is fixed.
        waiting: The bit of the word that is set if a take waits.
    """

    def __init__(self, *, shaped: bool) -> None:
        self._shape, self._count = (10, 18) if shaped else (0, 20)
        self.waiting = 1 << self._count
        self.max_count = self.waiting - 1
        self.max_shapes = (1 << self._shape) - 1
        self._step_shift = self._count + 2 + self._shape
        self.max_step = (1 << (63 - self._step_shift)) - 1
        # Half of the range, so that takes can advance it further.
        self.max_first_step = self.max_step >> 1

    def pack(self, state: State) -> int:
        """Return the word."""
        low = (state.shape << 1 | state.parity) << 1 | state.waiting
        return state.step << self._step_shift | low << self._count | state.number

    def unpack(self, word: int) -> State:
        """Return the state."""
        low = word >> self._count
        return State(
            word >> self._step_shift,
            low >> 2 & self.max_shapes,
            low >> 1 & 1,
            low & 1,
            word & self.max_count,
        )


class Record(NamedTuple):
    """What one rank has in one round: a buffer with the sum of its gradients.

    A single gradient that was computed in the buffer, has rows, or came in a message,
    is there as it was given. All others have been multiplied by their weights.

    Attributes:
        buffer: 0 or 1.
        number: Gradients in the sum.
        adding: Whether one more is being added, so that the sum is none.
        shape: Number of the shape; 0 if all rounds have the same one.
        copied: Whether the agent of the host's node has a copy of the sum.
        scaled: Whether the buffer has been multiplied.
        weight: Sum of the weights of the gradients, in a word of its own.
    """

    buffer: int
    number: int
    adding: int
    shape: int
    copied: int = 0
    scaled: int = 0
    weight: float = 1.0

    @property
    def factor(self) -> float:
        """What multiplies the buffer in a sum."""
        return 1.0 if self.scaled else self.weight

    def word(self) -> int:
        """Return all but the weight as one word, never 0 if it has a gradient."""
        counts = (self.copied << 10 | self.shape) << 20 | self.number
        return ((counts << 1 | self.scaled) << 1 | self.adding) << 1 | self.buffer

    def written(self, weight: float) -> Record:
        """Return the record after one more gradient."""
        total = self.weight + weight
        return Record(self.buffer, self.number + 1, 0, self.shape, 0, 1, total)

    @classmethod
    def of(cls, word: int, weight: float) -> Record:
        """Return the record of a word, and of its weight."""
        counts, adding, buffer = word >> 3, word >> 1 & 1, word & 1
        shape, copied = counts >> 20 & _MAX_SHAPE, counts >> 30
        number = counts & _MAX_NUMBER
        return cls(buffer, number, adding, shape, copied, word >> 2 & 1, weight)


@dataclass(frozen=True)
class Closed:
    """A closed round, of which all gradients are written, or lost.

    Attributes:
        step: At which its gradients were admitted.
        parity: Of the round.
        number: Gradients that were admitted to it.
        count: Those that are in it; the others were lost.
        weight: Sum of their weights.
        divisor: Of their sum: the weight, if the result is their mean.
        shape: Of its gradients, or of their rows.
        records: The records of the ranks that have gradients, in rank order.
        total: The bytes of their sum, in the accumulation dtype, if an agent sent them.
    """

    step: int
    parity: int
    number: int
    count: int = 0
    weight: float = 0.0
    divisor: float = 1.0
    shape: Shape = ()
    records: dict[int, Record] = field(default_factory=dict)
    total: bytes | None = None


@dataclass
class WordLayout:
    """Assigns consecutive words to the parts of an object, in the order of the calls.

    The words of one `take` are adjacent, and those of two calls follow each other, so
    that one read can cover them. ``count`` words have been assigned so far.
    """

    count: int = 0

    def take(self, count: int = 1, *, own_lines: bool = False) -> int:
        """Assign ``count`` words; return the index of the first."""
        line = _WORDS_PER_LINE if own_lines else 1
        index = -(-self.count // line) * line
        self.count = -(-(index + count) // line) * line
        return index

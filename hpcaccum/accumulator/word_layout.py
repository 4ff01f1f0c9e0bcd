"""What words mean: to which part of an object they belong, and numbers as words."""

from __future__ import annotations

import numpy as np

# 64 bytes on every processor that is common in clusters.
_WORDS_PER_LINE = 8


class WordLayout:
    """Assigns consecutive words to the parts of an object, in the order of the calls.

    The words of one `take` are adjacent, and those of two calls follow each other, so
    that one read can cover them.

    Args:
        after: A layout whose words come first, of words that every instance has.

    Attributes:
        count: Words assigned so far.
    """

    def __init__(self, after: WordLayout | None = None) -> None:
        self.count: int = after.count if after else 0

    def take(self, count: int = 1, *, own_lines: bool = False) -> int:
        """Assign ``count`` words; return the index of the first."""
        if own_lines:
            self._align()
        index = self.count
        self.count += count
        if own_lines:
            self._align()
        return index

    def _align(self) -> None:
        self.count += -self.count % _WORDS_PER_LINE


def word_of(number: float) -> int:
    """Return the bits of a number as a word."""
    return int(np.float64(number).view(np.int64))


def number_of(word: int) -> float:
    """Return the number of a word."""
    return float(np.int64(word).view(np.float64))

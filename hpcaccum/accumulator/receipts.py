"""What happened to every gradient: the `Receipt` of one, the `Counters` of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.mpi import AtomicWords

# Lags of this and more are counted together.
MAX_LAG = 31


@dataclass(frozen=True)
class Receipt:
    """What became of one gradient; true if it was accepted.

    Attributes:
        accepted: Whether it counts.
        local_step: The step it was computed at.
        global_step: The step it met.
    """

    accepted: bool
    local_step: int
    global_step: int

    def __bool__(self) -> bool:
        """Return whether the gradient was accepted."""
        return self.accepted

    @property
    def lag(self) -> int:
        """How many steps it was late."""
        return self.global_step - self.local_step


@dataclass(frozen=True)
class Tally:
    """How many gradients each rank had accepted and dropped, and how late they were.

    Attributes:
        accepted, dropped: One number a rank.
        lags: How many accepted and dropped gradients of all ranks had each lag. A
            negative lag counts as 0, one above `MAX_LAG` as `MAX_LAG`.
        given_up: One number a rank: gradients that were admitted but could not be
            written, because of an exception in the midst of the call. They are part of
            no mean. Empty on a device, which has none.
    """

    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]
    given_up: tuple[int, ...] = ()


# Columns of a row, and what they are to be.
Counts = tuple[tuple[int, int], ...]

_ACCEPTED, _DROPPED, _GIVEN_UP, _LAGS = range(4)


class Counters:
    """One row of counters a rank, in the host's words; each rank writes its own.

    Counting has two steps, so that it can be done again after an exception: `next`
    says what the counters will be, `post` sets them.

    Args:
        words: Where the rows are.
        base: Index of the first; the ledger takes ``Counters.words(size)`` words.
        rank, size: Whose row is written, and how many rows there are.
    """

    _WIDTH = _LAGS + MAX_LAG + 1

    def __init__(self, words: AtomicWords, base: int, rank: int, size: int) -> None:
        self._words, self._base, self._size = words, base, size
        self._index = base + rank * self._WIDTH
        self._row = [0] * self._WIDTH

    @classmethod
    def words(cls, size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return size * cls._WIDTH

    def next(self, receipt: Receipt) -> Counts:
        """Return the counters after one more gradient."""
        lag = min(max(receipt.global_step - receipt.local_step, 0), MAX_LAG)
        kind, row = _ACCEPTED if receipt.accepted else _DROPPED, self._row
        return (kind, row[kind] + 1), (_LAGS + lag, row[_LAGS + lag] + 1)

    def next_given_up(self) -> Counts:
        """Return the counters after one more gradient that was given up."""
        return ((_GIVEN_UP, self._row[_GIVEN_UP] + 1),)

    def post(self, counts: Counts) -> None:
        """Set counters; the next call on the words that waits publishes them."""
        for column, number in counts:
            self._row[column] = number
            self._words.store_unordered(self._index + column, number)

    def tally(self) -> Tally:
        """Return the counts of all ranks."""
        words = self._words.read_range(self._base, self.words(self._size))
        rows = np.array(words).reshape(self._size, self._WIDTH)
        lags = rows[:, _LAGS:].sum(axis=0).tolist()
        return Tally(
            tuple(rows[:, _ACCEPTED].tolist()),
            tuple(rows[:, _DROPPED].tolist()),
            {lag: number for lag, number in enumerate(lags) if number},
            tuple(rows[:, _GIVEN_UP].tolist()),
        )

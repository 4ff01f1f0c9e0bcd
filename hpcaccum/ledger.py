"""What happened to every gradient: the `Receipt` of one, the `Ledger` of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.window import Cells

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
        lags: How many gradients of all ranks had each lag. A negative lag counts as 0,
            one above `MAX_LAG` as `MAX_LAG`.
    """

    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    lags: dict[int, int]


class Ledger:
    """One row of counters a rank, in the host's cells; each rank writes its own.

    Args:
        cells: Where the rows are.
        base: Index of the first; the ledger takes ``Ledger.words(size)`` cells.
        rank, size: Whose row is written, and how many rows there are.
    """

    _WIDTH = 2 + MAX_LAG + 1

    def __init__(self, cells: Cells, base: int, rank: int, size: int) -> None:
        self._cells, self._base, self._size = cells, base, size
        self._index = base + rank * self._WIDTH

    @classmethod
    def words(cls, size: int) -> int:
        """Return the number of cells for ``size`` ranks."""
        return size * cls._WIDTH

    def post(self, receipt: Receipt) -> None:
        """Count one gradient; the next call on the cells that waits publishes it."""
        lag = min(max(receipt.global_step - receipt.local_step, 0), MAX_LAG)
        self._cells.count(self._index + (0 if receipt.accepted else 1))
        self._cells.count(self._index + 2 + lag)

    def tally(self) -> Tally:
        """Return the counts of all ranks."""
        words = self._cells.read_range(self._base, self.words(self._size))
        rows = np.array(words).reshape(self._size, self._WIDTH)
        lags = rows[:, 2:].sum(axis=0).tolist()
        return Tally(
            tuple(rows[:, 0].tolist()),
            tuple(rows[:, 1].tolist()),
            {lag: number for lag, number in enumerate(lags) if number},
        )

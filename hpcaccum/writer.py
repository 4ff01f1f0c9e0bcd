"""One rank's side of an accumulator: its two buffers, and gradients on their way."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.overlap import same_elements
from hpcaccum.rounds import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.ledger import Receipt
    from hpcaccum.rounds import Rounds
    from hpcaccum.storage import Slots, Sums

Array = np.ndarray[Any, Any]


class Writer:
    """Brings gradients of this rank to the round they are admitted to.

    A buffer is not tied to a parity: while one is held by a round that is being
    reduced, the other serves the open round, and a gradient computed in place is
    admitted to whichever round is open by then.

    Args:
        rounds: The protocol.
        storage: Where the gradients go.
        rank: This rank.
    """

    def __init__(self, rounds: Rounds, storage: Slots | Sums, rank: int) -> None:
        self._rounds, self._storage, self._rank = rounds, storage, rank
        self._lock = threading.Lock()
        self._left = False
        # What this rank has in the round of each parity; None if surely nothing.
        self._mine: list[Record | None] = [None, None]
        self._last_parity = 0
        # The buffer that `slot` handed out last, and the array that it is.
        self._lent: tuple[int, Array] | None = None

    def submit(
        self, array: Array, local_step: int, fit: Callable[[int], int]
    ) -> Receipt:
        """Add a gradient to the open round unless it is stale."""
        with self._lock:
            if self._left:
                raise InvalidArgumentError(
                    f"rank {self._rank} has left and can apply no more gradients"
                )
            receipt, parity, shape = self._rounds.admit(local_step, fit)
            self._rounds.ledger.post(receipt)
            if receipt:
                self._write(array, parity, shape, local_step)
            else:
                self._rounds.cells.flush()
        return receipt

    def _write(self, array: Array, parity: int, shape: int, local_step: int) -> None:
        before = self._before(parity)
        if before:
            buffer, count, there = before.buffer, before.number, False
        else:
            buffer, there = self._choose(array, parity)
            count = 0
        self._rounds.writing(parity, Record(buffer, count, 1, shape, local_step))
        self._storage.write(parity, buffer, array, first=not count, there=there)
        done = Record(buffer, count + 1, 0, shape, local_step)
        self._mine[parity], self._lent = done, None
        self._rounds.written(parity, done)

    def _before(self, parity: int) -> Record | None:
        """Return what this rank has in the round that is open now, of this parity."""
        if parity != self._last_parity:
            # The other parity was open in between, so this one was cleared.
            self._mine[parity], self._last_parity = None, parity
        elif self._mine[parity] and not self._rounds.holds(parity, self._rank):
            # Both parities may have changed places twice without this rank looking.
            self._mine[parity] = None
        return self._mine[parity]

    def _choose(self, array: Array, parity: int) -> tuple[int, bool]:
        """Return a buffer that no round holds; whether the gradient lies in it."""
        if self._lent is not None:
            index, slot = self._lent
            if same_elements(array, slot):
                return index, True
        other = self._mine[1 - parity]
        free = [1 - other.buffer] if other else [0, 1]
        # The one that was handed out may be lost: it is the caller's until now.
        kept = [b for b in free if self._lent is None or b != self._lent[0]]
        return (kept or free)[0], False

    def slot(self, shape: tuple[int, ...], deadline: Deadline) -> Array:
        """Return a buffer that no round holds; wait until there is one."""
        return deadline.wait(
            lambda: self._lend(shape),
            lambda: "the take that is reducing both buffers of this rank",
        )

    def _lend(self, shape: tuple[int, ...]) -> Array | None:
        with self._lock:
            for parity, mine in enumerate(self._mine):
                if mine and not self._rounds.holds(parity, self._rank):
                    self._mine[parity] = None
            free = {0, 1} - {mine.buffer for mine in self._mine if mine}
            if not free:
                return None
            index = min(free)
            flat = self._storage.buffer(index)[: math.prod(shape)]
            self._lent = index, flat.reshape(shape)
            return self._lent[1]

    def free(self) -> None:
        """Let go of the memory that was lent."""
        self._lent = None

    def leave(self) -> None:
        """Promise that this rank brings no more gradients."""
        with self._lock:
            if not self._left:
                self._left = True
                self._rounds.leave()

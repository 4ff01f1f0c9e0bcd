"""A lock that ranks hold first come, first served; a rank can give up.

Lamport's bakery: a rank draws a ticket and waits until no other has a lower one. The
ticket of a rank is a word that only this rank writes. So giving up is one store, a rank
that keeps others waiting can be named, and one that is lost is passed.

Source: L. Lamport, A New Solution of Dijkstra's Concurrent Programming Problem, 1974.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import AtomicWords

_ABSENT, _DRAWING = 0, -1


class TicketLock:
    """A lock among ranks, with one line before it; on the node of the words only.

    ``dead`` returns the ranks that have no position in the line any more.
    """

    def __init__(
        self,
        words: AtomicWords,
        base: int,
        size: int,
        dead: Callable[[], list[int]],
    ) -> None:
        self._words, self._size = words, size
        self._last, self._tickets = base, base + 1
        self._dead = dead

    @staticmethod
    def words(size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return 1 + size

    def draw(self, rank: int) -> int:
        """Draw a ticket for a rank, which has its turn when `before` returns nobody."""
        words, index = self._words, self._tickets + rank
        # A rank with a later ticket must not pass before this ticket is published.
        words.write(index, _DRAWING)
        ticket = words.fetch_add(self._last, 1) + 1
        words.write(index, ticket)
        return ticket

    def before(self, rank: int, ticket: int) -> list[int]:
        """Return the ranks that come before that of a ticket, or may do so."""
        tickets = self._words.read_range(self._tickets, self._size)
        before = [
            other
            for other, drawn in enumerate(tickets)
            if other != rank and (drawn == _DRAWING or _ABSENT < drawn < ticket)
        ]
        if before:
            dead = self._dead()
            before = [other for other in before if other not in dead]
        return before

    def leave(self, rank: int) -> None:
        """Pass the turn of a rank on, or leave the line."""
        self._words.write(self._tickets + rank, _ABSENT)

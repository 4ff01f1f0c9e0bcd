"""A lock that ranks hold first come, first served; a rank can give up its place.

Lamport's bakery: a rank draws a ticket and waits until no other has a lower one. The
place of a rank in the line is a word that only this rank writes. So giving up is one
store, and a rank that keeps others waiting can be named.

Source: L. Lamport, A New Solution of Dijkstra's Concurrent Programming Problem, 1974.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hpcaccum.accumulator.claim import Claim, Claimant
from hpcaccum.errors import format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import AtomicWords

T = TypeVar("T")

_ABSENT, _DRAWING = 0, -1


class TicketLock:
    """A lock among ranks, with one line before it.

    Args:
        words: The words.
        base: Index of the first of ``TicketLock.words(size)`` words.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, words: AtomicWords, base: int, rank: int, size: int) -> None:
        self._words, self._rank, self._size = words, rank, size
        self._ticket, self._places = base, base + 1
        # Threads of one rank share its place.
        self._inside = Claim()

    @staticmethod
    def words(size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return 1 + size

    def hold(self, deadline: Deadline, do: Callable[[], T]) -> T:
        """Wait for this rank's turn, call ``do``, and pass the turn on afterwards."""
        me = Claimant(deadline.what)
        try:
            missing = "another thread of this rank to pass its turn on"
            deadline.wait(lambda: self._inside.make(me), lambda: missing)
            self._wait_in_line(deadline)
            return do()
        finally:
            # A signal handler may raise again, and no other rank can do this.
            try:
                self._leave(me)
            except BaseException:
                self._leave(me)
                raise

    def _leave(self, me: Claimant) -> None:
        if self._inside.is_of(me):
            self._words.write(self._places + self._rank, _ABSENT)
            self._inside.end(me)

    def _wait_in_line(self, deadline: Deadline) -> None:
        place = self._places + self._rank
        # A rank with a later ticket must not pass before this ticket is published.
        self._words.write(place, _DRAWING)
        ticket = self._words.fetch_add(self._ticket, 1) + 1
        self._words.write(place, ticket)
        deadline.wait(
            lambda: None if self._before(ticket) else True,
            lambda: f"{format_ranks(self._before(ticket))}, ahead of this rank",
        )

    def _before(self, ticket: int) -> list[int]:
        """Return the ranks that come before ``ticket``, or may do so."""
        places = self._words.read_range(self._places, self._size)
        return [
            rank
            for rank, place in enumerate(places)
            if rank != self._rank and (place == _DRAWING or _ABSENT < place < ticket)
        ]

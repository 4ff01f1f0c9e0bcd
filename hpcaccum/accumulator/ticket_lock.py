"""A lock that ranks hold first come, first served; a rank can give up its place.

Lamport's bakery: a rank draws a ticket and waits until no other has a lower one. The
place of a rank in the line is a word that only this rank writes. So giving up is one
store, a rank that keeps others waiting can be named, and one that is lost is passed.

Source: L. Lamport, A New Solution of Dijkstra's Concurrent Programming Problem, 1974.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hpcaccum.accumulator.one_thread import OneThread
from hpcaccum.errors import format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import AtomicWords

_ABSENT, _DRAWING = 0, -1


class TicketLock:
    """A lock among ranks, with one line before it.

    Args:
        words: The words.
        base: Index of the first of ``TicketLock.words(size)`` words.
        rank: This rank.
        size: The number of ranks.
        lost: Returns the ranks whose places do not count.
        what: Name for messages.
    """

    def __init__(
        self,
        words: AtomicWords,
        base: int,
        rank: int,
        size: int,
        lost: Callable[[], list[int]],
        what: str,
    ) -> None:
        self._words, self._rank, self._size = words, rank, size
        self._ticket, self._places = base, base + 1
        self._lost = lost
        # Threads of one rank share its place.
        self._inside = OneThread(what)

    @staticmethod
    def words(size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return 1 + size

    @contextlib.contextmanager
    def hold(self, call: str, deadline: Deadline) -> Iterator[None]:
        """Wait for this rank's turn; pass the turn on after the block."""
        with self._inside.hold(call, deadline):
            try:
                self._wait_in_line(deadline)
                yield
            finally:
                self._words.write(self._places + self._rank, _ABSENT)

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
        before = [
            rank
            for rank, place in enumerate(places)
            if rank != self._rank and (place == _DRAWING or _ABSENT < place < ticket)
        ]
        if before:
            lost = self._lost()
            before = [rank for rank in before if rank not in lost]
        return before

"""Turns: one thread of a rank at a time, and one rank at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import AtomicWords

if TYPE_CHECKING:
    from typing_extensions import Self

_ABSENT, _DRAWING = 0, -1


class OneThread:
    """Lets one thread at a time make calls; others wait, with their limit.

    Messages begin with ``what``, and say that others wait for ``other``.
    """

    def __init__(self, what: str, other: str = "another thread of this rank") -> None:
        self._what, self._other = what, other
        # Reentrant: a signal handler gets an error instead of waiting for what it has
        # interrupted.
        self._lock, self._busy = threading.RLock(), False

    def hold(self, call: str, deadline: Deadline | None = None) -> Self:
        """Wait for other threads, then let none make a call during the `with` block.

        Raises WaitTimeoutError; and InvalidArgumentError in a signal handler that has
        interrupted a call, for which it would wait without end.
        """
        if not self._lock.acquire(blocking=False):
            deadline = deadline or Deadline(None, f"{self._what}: {call}")
            deadline.acquire(self._lock, lambda: self._other)
        if self._busy:
            self._lock.release()
            raise InvalidArgumentError(
                f"{self._what}: {call} was called in a signal handler that interrupted "
                f"another call: set a flag in the handler, and make the call later"
            )
        self._busy = True
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._busy = False
        self._lock.release()


class TicketLock:
    """A lock that ranks hold first come, first served; on the node of the words only.

    Lamport's bakery: a rank draws a ticket and waits until no other has a lower one.
    The ticket of a rank is a word that only this rank writes. So giving up is one
    store, a rank that keeps others waiting can be named, and one that is lost is
    passed: ``dead`` returns the ranks that have no position in the line any more.

    Source: L. Lamport, A New Solution of Dijkstra's Concurrent Programming Problem,
    1974.
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

"""First come, first served among ranks, with places that can be given up.

Lamport's bakery: a rank draws a ticket and waits until nobody has a lower one. A place
in the line is one word of its own, so that giving it up is one store, and a rank that
holds everybody up can be named.

Source: L. Lamport, A New Solution of Dijkstra's Concurrent Programming Problem, 1974.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from hpcaccum.errors import WaitTimeoutError
from hpcaccum.group import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.deadline import Deadline
    from hpcaccum.window import Cells

_ABSENT, _DRAWING = 0, -1


class Line:
    """A line of ranks before one counter.

    Args:
        cells: Where the line is.
        base: Index of its first cell; it takes ``1 + size``.
        rank, size: This rank, and how many may stand in line.
    """

    def __init__(self, cells: Cells, base: int, rank: int, size: int) -> None:
        self._cells, self._rank, self._size = cells, rank, size
        self._ticket, self._places = base, base + 1
        # Threads of one rank share its place.
        self._mine = threading.Lock()

    @contextlib.contextmanager
    def turn(self, deadline: Deadline) -> Iterator[None]:
        """Wait for this rank's turn, and pass it on in the end.

        Raises:
            WaitTimeoutError: If it does not come in time; the place is given up.
        """
        patience = min(deadline.remaining, threading.TIMEOUT_MAX)
        if not self._mine.acquire(timeout=patience):
            message = f"{deadline.what}: another thread of this rank holds the turn"
            raise WaitTimeoutError(message)
        try:
            self._stand(deadline)
            yield
        finally:
            self._cells.write(self._places + self._rank, _ABSENT)
            self._mine.release()

    def _stand(self, deadline: Deadline) -> None:
        here = self._places + self._rank
        # Between drawing and showing a ticket, a later one must not pass by.
        self._cells.write(here, _DRAWING)
        ticket = self._cells.add(self._ticket, 1) + 1
        self._cells.write(here, ticket)
        deadline.wait(
            lambda: None if self._before(ticket) else True,
            lambda: f"{ranks_text(self._before(ticket))}, before this rank in line",
        )

    def _before(self, ticket: int) -> list[int]:
        """Return the ranks that come before ``ticket``, or may yet."""
        places = self._cells.read_range(self._places, self._size)
        return [
            rank
            for rank, place in enumerate(places)
            if rank != self._rank and (place == _DRAWING or _ABSENT < place < ticket)
        ]

"""A lock between updates and those who read several things of one step."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from hpcaccum.errors import WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.deadline import Deadline


class UpdateLock:
    """Held by a server during each update, and by readers between two updates.

    A reader that waits comes before the next update, however busy the server is: it
    holds a gate that the server has to pass. A thread that holds the lock may read
    again, so what an update calls (a learning rate) may read too.
    """

    def __init__(self) -> None:
        # Reentrant, also for a signal handler that reads.
        self._gate, self._lock = threading.RLock(), threading.RLock()
        self._reader: int | None = None

    def __enter__(self) -> None:
        """Begin an update."""
        with self._gate:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """End an update."""
        self._lock.release()

    @contextlib.contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """Keep updates from beginning.

        Raises:
            WaitTimeoutError: If an update, or another reader, does not end in time.
        """
        # Without the gate if this thread holds the lock: a second reader may hold the
        # gate and wait for this one.
        if not self._lock.acquire(blocking=False):
            self._wait(deadline)
        before, self._reader = self._reader, threading.get_ident()
        try:
            yield
        finally:
            self._reader = before
            self._lock.release()

    def _wait(self, deadline: Deadline) -> None:
        if not self._gate.acquire(timeout=_seconds(deadline)):
            raise WaitTimeoutError(f"{deadline.what}: another thread reads")
        try:
            if not self._lock.acquire(timeout=_seconds(deadline)):
                raise WaitTimeoutError(
                    f"{deadline.what}: waited {deadline.elapsed:.3g} s for an update "
                    f"of this rank to end"
                )
        finally:
            self._gate.release()

    def is_read_by_this_thread(self) -> bool:
        """Whether this thread keeps updates from beginning."""
        return self._reader == threading.get_ident()


def _seconds(deadline: Deadline) -> float:
    return min(deadline.remaining, threading.TIMEOUT_MAX)

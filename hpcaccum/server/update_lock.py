"""A lock between updates and those who read several values of one step."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator


class UpdateLock:
    """Held by a server during each update, and by readers between two updates.

    A waiting reader comes before the next update, however busy the server is: it holds
    a gate that the server must pass. The thread that holds the lock may read again, so
    a function that an update calls (a learning rate) may read too.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Reentrant, also for a signal handler that reads.
        self._gate, self._lock = threading.RLock(), threading.RLock()
        self._reader: int | None = None

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Hold the lock during an update.

        No time limit: the ranks that wait for the update have one.
        """
        self._pass(self._gate)
        try:
            self._pass(self._lock)
        finally:
            self._gate.release()
        try:
            yield
        finally:
            self._lock.release()

    def _pass(self, lock: Any) -> None:
        # Almost always free: a deadline would cost more than the lock.
        if not lock.acquire(blocking=False):
            deadline = Deadline(math.inf, f"{self._what}: update")
            deadline.acquire(lock, lambda: "a read of this rank to end")

    @contextlib.contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock between two updates."""
        again = self.is_read_by_this_thread()
        # Without the gate if this thread holds the lock: another reader may hold the
        # gate while it waits for this one.
        if not self._lock.acquire(blocking=False):
            self._acquire_next(deadline)
        try:
            self._reader = threading.get_ident()
            yield
        finally:
            if not again:
                self._reader = None
            self._lock.release()

    def _acquire_next(self, deadline: Deadline) -> None:
        """Acquire the lock before the next update."""
        missing = "a read by another thread of this rank to end"
        deadline.acquire(self._gate, lambda: missing)
        try:
            deadline.acquire(self._lock, lambda: "an update of this rank to end")
        finally:
            self._gate.release()

    def is_read_by_this_thread(self) -> bool:
        """Whether this thread prevents updates."""
        return self._reader == threading.get_ident()

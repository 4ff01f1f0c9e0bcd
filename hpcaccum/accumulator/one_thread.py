"""One thread at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_a_handler(call: object) -> InvalidArgumentError:
    """Return the error of a call that would wait for what it has interrupted."""
    return InvalidArgumentError(
        f"{call} was called in a signal handler that interrupted another call: set a "
        f"flag in the handler, and make the call later"
    )


class OneThread:
    """Lets one thread at a time make calls; others wait, with their limit.

    Args:
        what: Name for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Reentrant, so that a signal handler gets an error instead of waiting for what
        # it has interrupted.
        self._lock, self._busy = threading.RLock(), False

    def run(
        self, call: str, do: Callable[[], T], deadline: Deadline | None = None
    ) -> T:
        """Return the result of a function."""
        held: list[bool] = []
        try:
            if not Deadline.try_acquire(self._lock, held):
                deadline = deadline or Deadline(None, f"{self._what}: {call}")
                deadline.acquire(
                    self._lock, held, lambda: "another thread of this rank"
                )
            if self._busy:
                raise in_a_handler(f"{self._what}: {call}")
            try:
                self._busy = True
                return do()
            finally:
                self._busy = False
        finally:
            if held:
                self._lock.release()

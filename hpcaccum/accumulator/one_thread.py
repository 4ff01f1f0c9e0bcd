"""One thread at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self


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

        Raises:
            WaitTimeoutError: If another thread does not end its call in time.
            InvalidArgumentError: In a signal handler that has interrupted a call, for
                which it would wait without end.
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

"""One thread at a time."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator


class OneThread:
    """Lets one thread at a time make calls; others wait, with their limit.

    Args:
        what: Name for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock, self._owner = threading.Lock(), 0

    @contextlib.contextmanager
    def hold(self, call: str, deadline: Deadline | None = None) -> Iterator[None]:
        """Let no other thread make a call during the block.

        Raises:
            WaitTimeoutError: If another thread does not end its call in time.
            InvalidArgumentError: In a signal handler that has interrupted a call, for
                which it would wait without end.
        """
        me = threading.get_ident()
        if self._owner == me:
            raise InvalidArgumentError(
                f"{self._what}: {call} in a signal handler, which has interrupted "
                f"another call: set a flag in the handler, and call it later"
            )
        if not self._lock.acquire(blocking=False):
            deadline = deadline or Deadline(None, f"{self._what}: {call}")
            deadline.block(self._acquire, lambda: "another thread of this rank")
        try:
            self._owner = me
            yield
        finally:
            self._owner = 0
            self._lock.release()

    def _acquire(self, seconds: float) -> bool | None:
        return self._lock.acquire(timeout=seconds) or None

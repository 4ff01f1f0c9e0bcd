"""Naps that another thread ends."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Wake:
    """Lets one thread nap until another one wakes it.

    A signal handler may raise in any call and leaves nothing locked. That is not so
    with `threading.Event` and `threading.Condition`, which run Python code while they
    hold a lock: all other threads would wait for that lock without end.
    """

    def __init__(self) -> None:
        # Free: the next nap is over at once.
        self._lock = threading.Lock()
        self._lock.acquire()

    def nap(self, seconds: float) -> bool:
        """Wait for a call of `wake`, or return False after ``seconds``.

        A call that came before is enough, but several count as one.
        """
        return self._lock.acquire(timeout=seconds)

    def until(self, fact: Callable[[], bool]) -> Callable[[float], bool | None]:
        """Return what naps unless something is true; for `Deadline.block`."""

        def attempt(seconds: float) -> bool | None:
            if not fact():
                self.nap(seconds)
            return fact() or None

        return attempt

    def wake(self) -> None:
        """End the nap, or the next one."""
        # It is free already if nobody has napped since the last call.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

"""When a thread that calls MPI for other nodes takes its turns."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.deadline import MOVING_NAP, nap_after

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Seconds between two calls of MPI while other ranks are active. A gradient takes half a
# dozen of them; the thread takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# Switch interval of Python's threads: the longest that a computation in Python delays
# this thread.
_SWITCH_INTERVAL = 1e-3


class ShortSwitchInterval:
    """While it has a user, Python's threads take turns more often than every 5 ms.

    Otherwise a computation in Python delays a thread that calls MPI for so long.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        """Count a user; the first one shortens the interval, unless it is shorter."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                # Python rounds what it is set to: a shorter one is not touched.
                if self._before > _SWITCH_INTERVAL:
                    sys.setswitchinterval(_SWITCH_INTERVAL)

    def __exit__(self, *error: object) -> None:
        """Count a user less; the last one restores the interval."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._before > _SWITCH_INTERVAL:
                sys.setswitchinterval(self._before)


short_switch_interval = ShortSwitchInterval()


class Progress:
    """How long the agent of a node may nap between two calls of MPI.

    It naps for longer when what it watches has not changed for a while, and only
    briefly while data arrive that move when MPI is called.
    """

    def __init__(self) -> None:
        # What is watched; of windows, whether data arrive.
        self._watched: list[Callable[[], memoryview]] = []
        self._arrivals: list[Callable[[], bool]] = []
        self._lock = threading.Lock()
        # What was there, and when it had changed.
        self._seen: list[bytes] = []
        self._changed = -math.inf

    def watch(self, used: Callable[[], memoryview]) -> Callable[[], None]:
        """Watch memory whose changes announce requests; return what ends that."""
        return self._add(self._watched, used)

    def expect(self, arrives: Callable[[], bool]) -> Callable[[], None]:
        """Watch whether data arrive, piece by piece; return what ends that."""
        return self._add(self._arrivals, arrives)

    def _add(self, those: list[T], each: T) -> Callable[[], None]:
        with self._lock:
            those.append(each)

        def end() -> None:
            with self._lock:
                those.remove(each)

        return end

    def nap(self, idle: float) -> float:
        """Return how long a thread that calls MPI may nap; for one thread at a time.

        Args:
            idle: Seconds since the thread was needed.
        """
        longest = nap_after(idle)
        if self._data_arrive():
            return min(longest, MOVING_NAP)
        if longest <= _NAP:
            return longest
        return min(longest, max(_NAP, nap_after(self._unchanged())))

    def _data_arrive(self) -> bool:
        # Nothing is freed meanwhile.
        with self._lock:
            return any(arrives() for arrives in self._arrivals)

    def _unchanged(self) -> float:
        """Return for how many seconds no change has been seen."""
        with self._lock:
            found = [bytes(used()) for used in self._watched]
        now = time.monotonic()
        if found != self._seen:
            self._seen, self._changed = found, now
        return now - self._changed

"""When a thread that calls MPI for other nodes takes its turns."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from hpcaccum.deadline import MOVING_NAP, nap_after

T = TypeVar("T")

# Seconds between two calls of MPI while other ranks are active. A gradient takes half a
# dozen of them; the thread takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# Switch interval of Python's threads: the longest that a computation in Python delays
# this thread.
_SWITCH_INTERVAL = 1e-3


# The switch interval, as each thread in `short_switch_interval` has found it.
_found: list[float] = []
_changing = threading.Lock()


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Have Python's threads take turns more often than every 5 ms in the block.

    Otherwise a computation in Python delays a thread that calls MPI for so long.
    """
    with _changing:
        _found.append(sys.getswitchinterval())
        # Python rounds what it is set to: a shorter one is not touched.
        if _found[-1] > _SWITCH_INTERVAL:
            sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        with _changing:
            before = _found[0]
            _found.pop()
            if not _found and before > _SWITCH_INTERVAL:
                sys.setswitchinterval(before)


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
        """Return how long a thread that has been idle so long may nap between calls.

        For one thread at a time.
        """
        longest = nap_after(idle)
        # Nothing is freed meanwhile.
        with self._lock:
            data_arrive = any(arrives() for arrives in self._arrivals)
        if data_arrive:
            return min(longest, MOVING_NAP)
        if longest <= _NAP:
            return longest
        return min(longest, max(_NAP, nap_after(self._unchanged())))

    def _unchanged(self) -> float:
        """Return for how many seconds no change has been seen."""
        with self._lock:
            found = [bytes(used()) for used in self._watched]
        now = time.monotonic()
        if found != self._seen:
            self._seen, self._changed = found, now
        return now - self._changed

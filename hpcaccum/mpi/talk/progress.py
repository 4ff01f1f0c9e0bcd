"""Progress of MPI between nodes while a rank computes."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.deadline import MOVING_NAP, Deadline, nap_after
from hpcaccum.mpi.job.runtime import MPI, lack_of_threads
from hpcaccum.mpi.talk.control_messages import Tag
from hpcaccum.mpi.talk.failures import may_receive
from hpcaccum.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")

# Seconds between two calls of MPI while other ranks are active. A gradient takes half a
# dozen of them; the thread takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# Bytes of a window up to which the thread looks whether they change.
_WATCHED = 1 << 16
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


class ProgressThread:
    """Calls MPI while this rank computes, so that other nodes reach its windows.

    Between nodes a one-sided call may wait until the target enters MPI. A thread that
    probes for a message which no rank sends is enough; each group has one, unless
    another thread replaces it. While one runs, Python's threads have a
    `short_switch_interval`. It naps for longer when its windows have not changed for a
    while, unless one of them is too large to see that; and only briefly while data
    arrive that move when MPI is called.

    Args:
        comm: Communicator on which to probe.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm) -> None:
        self._comm = comm
        self._windows: list[Callable[[], memoryview]] = []
        # Of those which say so: whether data arrive.
        self._arrivals: dict[Callable[[], memoryview], Callable[[], bool]] = {}
        self._lock = threading.Lock()
        # What was in the windows, and when they had changed.
        self._seen: list[bytes | None] = []
        self._changed = -math.inf
        self._replaced = False
        self._thread: threading.Thread | None = None
        # Ends the last nap of the thread.
        self._end = Wake()

    def start(
        self,
        used: Callable[[], memoryview],
        arrives: Callable[[], bool] | None = None,
    ) -> None:
        """Add a window; the first starts the thread.

        Args:
            used: Returns its used memory. To look at memory that nobody uses would
                clear the caches of a core.
            arrives: Returns whether data arrive in it, piece by piece.
        """
        with self._lock:
            self._windows.append(used)
            if arrives is not None:
                self._arrivals[used] = arrives
        self._start_or_stop()

    def stop(self, used: Callable[[], memoryview]) -> None:
        """Remove a window; the last one stops the thread."""
        with self._lock:
            self._windows = _without(used, self._windows)
            self._arrivals.pop(used, None)
        self._start_or_stop()

    def replace(self, replaced: bool) -> None:
        """Stop the thread while another one calls MPI, and naps as `nap` says."""
        self._replaced = replaced
        self._start_or_stop()

    def _start_or_stop(self) -> None:
        wanted = bool(self._windows) and not self._replaced
        if self._thread is not None and not wanted:
            self._stop(self._thread)
        if wanted and self._thread is None:
            self._start()

    def _start(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            if len(self._windows) == 1:
                needs = "ranks on other nodes need, or wait while this rank computes"
                logger.warning("%s", lack_of_threads(needs))
            return
        self._end = Wake()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _stop(self, thread: threading.Thread) -> None:
        self._thread = None
        self._end.wake()
        # A thread of this rank: no limit of the user's applies.
        deadline = Deadline(math.inf, "progress")
        deadline.join(thread, lambda: "its thread to end")

    def _run(self) -> None:
        with short_switch_interval:
            while not self._end.nap(self.nap(math.inf)):
                self.look()

    def look(self) -> None:
        """Enter MPI once; for a rank that waits for another node."""
        may_receive(self._comm, MPI.ANY_SOURCE, Tag.NONE)

    def look_for_others(self) -> None:
        """Do so unless another thread does; for a rank that polls its own memory.

        Two threads in MPI wait for each other.
        """
        if not self._replaced:
            self.look()

    def nap(self, idle: float) -> float:
        """Return how long a thread that calls MPI may nap; for one thread at a time.

        Args:
            idle: Seconds since the thread was needed for something else than windows.
        """
        longest = nap_after(idle)
        if self._data_arrive():
            return min(longest, MOVING_NAP)
        if longest <= _NAP:
            return longest
        return min(longest, max(_NAP, nap_after(self._unchanged())))

    def _data_arrive(self) -> bool:
        # No window is freed meanwhile.
        with self._lock:
            for arrives in self._arrivals.values():
                if arrives():
                    return True
        return False

    def _unchanged(self) -> float:
        """Return for how many seconds no change of a window has been seen."""
        # No window is freed meanwhile.
        with self._lock:
            windows = [used() for used in self._windows]
            found = [bytes(w) if w.nbytes <= _WATCHED else None for w in windows]
        now = time.monotonic()
        if found != self._seen or None in found:
            self._seen, self._changed = found, now
        return now - self._changed


def _without(each: object, others: Iterable[T]) -> list[T]:
    return [other for other in others if other is not each]

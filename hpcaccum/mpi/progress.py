"""Progress of MPI between nodes while a rank computes."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.tags import Tag
from hpcaccum.wake import Wake

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

# Seconds between two calls of MPI while other ranks are active. A gradient takes half a
# dozen of them; the thread takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# Naps of a thread that nobody needs: a part of the time since it was needed, and at
# most this many seconds. Two idle threads on each of 4 ranks, with naps of 0.3 ms, made
# all else on 2 cores take twice as long.
_PART, _LONGEST_NAP = 0.01, 5e-3
# Bytes of a window up to which the thread looks whether they change.
_WATCHED = 1 << 16
# Switch interval of Python's threads: the longest that a computation in Python delays
# this thread.
_SWITCH_INTERVAL = 1e-3


class ShortSwitchInterval:
    """Makes Python's threads take turns more often than every 5 ms, while any user is.

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


def idle_nap(idle: float, shortest: float) -> float:
    """Return how long a thread naps that other ranks last needed ``idle`` seconds ago.

    It delays what they ask for next by at most 1 % of that time, or ``shortest``.
    """
    return min(max(shortest, _PART * idle), _LONGEST_NAP)


class ProgressThread:
    """Calls MPI while this rank computes, so that other nodes reach its windows.

    Between nodes a one-sided call may wait until the target enters MPI. A thread that
    probes for a message which no rank sends is enough; each group has one. While one
    runs, Python's threads have a `short_switch_interval`. It naps for longer when its
    windows have not changed for a while, unless one of them is too large to see that.

    Args:
        comm: Communicator on which to probe.
        needed: Whether a thread is needed: whether there are other nodes.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, *, needed: bool) -> None:
        self._comm, self._needed = comm, needed
        self._windows: list[memoryview] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Ends the last nap of the thread.
        self._end = Wake()

    def start(self, memory: memoryview) -> None:
        """Add the memory of a window; the first one starts the thread."""
        with self._lock:
            self._windows.append(memory)
        if len(self._windows) > 1 or not self._needed:
            return
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            logger.warning(
                "MPI does not provide MPI_THREAD_MULTIPLE: ranks on other nodes wait "
                "while this rank computes"
            )
            return
        self._end = Wake()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        short_switch_interval.__enter__()

    def _run(self) -> None:
        seen, changed = self._contents(), time.monotonic()
        while not self._end.nap(idle_nap(time.monotonic() - changed, _NAP)):
            self.look()
            found = self._contents()
            if found != seen or None in found:
                seen, changed = found, time.monotonic()

    def look(self) -> None:
        """Enter MPI once; for a rank that polls what other nodes change."""
        self._comm.Iprobe(MPI.ANY_SOURCE, Tag.NONE)

    def _contents(self) -> list[bytes | None]:
        """Return what is in all windows, of which there is none at the end."""
        # No window is freed meanwhile.
        with self._lock:
            return [
                bytes(memory) if memory.nbytes <= _WATCHED else None
                for memory in self._windows
            ]

    def stop(self, memory: memoryview) -> None:
        """Remove the memory of a window; the last one stops the thread."""
        with self._lock:
            self._windows = [each for each in self._windows if each is not memory]
        if self._windows or self._thread is None:
            return
        self._end.wake()
        # A thread of this rank: no limit of the user's applies.
        Deadline(math.inf, "progress").join(self._thread, lambda: "its thread to end")
        self._thread = None
        short_switch_interval.__exit__()

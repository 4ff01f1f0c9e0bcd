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

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

# Seconds between two calls of MPI. A gradient takes half a dozen of them; the thread
# takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# Switch interval of Python's threads: the longest that a computation in Python delays
# this thread.
_SWITCH_INTERVAL = 1e-3
# A tag that no message carries.
_NO_TAG = 2


class ProgressThread:
    """Calls MPI while this rank computes, so that other nodes reach its windows.

    Between nodes a one-sided call may wait until the target enters MPI. A thread that
    probes for a message which no rank sends is enough; each group has one. While one
    runs, the switch interval of Python's threads is shorter than its default of 5 ms.

    Args:
        comm: Communicator on which to probe.
        needed: Whether a thread is needed: whether there are other nodes.
    """

    _running, _interval = 0, 0.0

    def __init__(self, comm: mpi4py_MPI.Intracomm, *, needed: bool) -> None:
        self._comm, self._needed = comm, needed
        self._users, self._stopped = 0, False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Count a user; the first one starts the thread."""
        self._users += 1
        if self._users > 1 or not self._needed:
            return
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            logger.warning(
                "MPI does not provide MPI_THREAD_MULTIPLE: ranks on other nodes wait "
                "while this rank computes"
            )
            return
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if ProgressThread._running == 0:
            ProgressThread._interval = sys.getswitchinterval()
            if ProgressThread._interval > _SWITCH_INTERVAL:
                sys.setswitchinterval(_SWITCH_INTERVAL)
        ProgressThread._running += 1

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(_NAP)
            self._comm.Iprobe(MPI.ANY_SOURCE, _NO_TAG)

    def stop(self) -> None:
        """Count a user less; the last one stops the thread."""
        self._users -= 1
        if self._users > 0 or self._thread is None:
            return
        self._stopped = True
        # A thread of this rank: no limit of the user's applies.
        Deadline(math.inf, "progress").join(self._thread, lambda: "its thread to end")
        self._thread = None
        ProgressThread._running -= 1
        if ProgressThread._running == 0 and ProgressThread._interval > _SWITCH_INTERVAL:
            sys.setswitchinterval(ProgressThread._interval)

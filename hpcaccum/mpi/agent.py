"""Progress between nodes, while a rank computes."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from hpcaccum.mpi.runtime import MPI

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

# How often a host that computes lets MPI serve the other nodes. A gradient takes half a
# dozen such turns; the thread takes some 3 % of one core, at 0.1 ms up to a tenth.
_NAP = 3e-4
# For how long a host that computes in Python keeps the thread waiting, at most.
_TURN = 1e-3
# A tag that no message of ours carries.
_NO_TAG = 2


class ProgressThread:
    """Lets MPI serve other nodes, if there are any, while this rank computes.

    Between nodes a one-sided call may wait until the target enters MPI. A thread that
    probes for a message that nobody sends is enough; there is one a group. While one
    runs, threads of Python take turns more often than every 5 ms.
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
                "MPI gives no MPI_THREAD_MULTIPLE: ranks on other nodes wait while "
                "the host computes"
            )
            return
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if ProgressThread._running == 0:
            ProgressThread._interval = sys.getswitchinterval()
            if ProgressThread._interval > _TURN:
                sys.setswitchinterval(_TURN)
        ProgressThread._running += 1

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(_NAP)
            self._comm.Iprobe(MPI.ANY_SOURCE, _NO_TAG)

    def stop(self) -> None:
        """Count a user less; the last one ends the thread."""
        self._users -= 1
        if self._users > 0 or self._thread is None:
            return
        self._stopped = True
        self._thread.join()
        self._thread = None
        ProgressThread._running -= 1
        if ProgressThread._running == 0 and ProgressThread._interval > _TURN:
            sys.setswitchinterval(ProgressThread._interval)

"""Messages that name the ranks which have not made a collective call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group

# Seconds of waiting after which a rank announces its call to the others. This is well
# before the first warning, and so rare that one message to each rank does not matter.
_PATIENCE = 5.0


class Arrivals:
    """Ranks that wait in a call announce it; the others are missing. Collective.

    Nothing is sent while calls are fast. Ranks are not asked: a rank that computes
    would not answer.

    Args:
        group: The ranks. The messages travel on a duplicate of its communicator.
    """

    def __init__(self, group: Group) -> None:
        self._comm = group.comm.Dup()
        # The last call that each rank has announced.
        self._calls = [0] * group.size
        # Messages received from each rank, and messages sent to each rank.
        self._received, self._announced = [0] * group.size, 0
        self._sent: list[Any] = []

    def announce(self, call: int, deadline: Deadline) -> None:
        """Send the number of this rank's call to all ranks, once, after a long wait."""
        rank = self._comm.rank
        limit = deadline.elapsed + deadline.remaining
        if self._calls[rank] >= call or deadline.elapsed < min(_PATIENCE, limit / 4):
            return
        self._calls[rank] = call
        word = np.array([call], np.int64)
        others = [other for other in range(self._comm.size) if other != rank]
        self._sent += [self._comm.Isend(word, other) for other in others]
        self._announced += 1

    def missing(self, call: int) -> list[int]:
        """Return the ranks that have not announced this call."""
        status = MPI.Status()
        while self._comm.Iprobe(status=status):
            self._receive(status.Get_source())
        return [rank for rank, last in enumerate(self._calls) if last < call]

    def _receive(self, source: int) -> None:
        word = np.zeros(1, np.int64)
        self._comm.Recv(word, source)
        self._received[source] += 1
        self._calls[source] = max(self._calls[source], int(word[0]))

    def free(self) -> None:
        """Free the communicator. Collective; no rank may wait in a call any more."""
        # Drain every message: MPI may reuse the context id.
        for source, announced in enumerate(self._comm.allgather(self._announced)):
            while source != self._comm.rank and self._received[source] < announced:
                self._receive(source)
        MPI.Request.Waitall(self._sent)
        self._comm.Free()

"""Who has made a collective call, asked only when somebody has waited for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group

# Seconds of waiting after which a rank tells the others that it is there: well before
# the first warning, and so rare that the messages, one to each rank, do not matter.
_PATIENCE = 5.0


class Arrivals:
    """Ranks that wait tell each other so; those not heard of are missing. Collective.

    Nothing is sent while calls are fast, and nobody is asked: a rank that computes
    would not answer.
    """

    def __init__(self, group: Group) -> None:
        self._comm = group.comm.Dup()
        self._heard = [0] * group.size
        # Messages received from each rank, and those that this one sent to each.
        self._received, self._told = [0] * group.size, 0
        self._sent: list[Any] = []

    def attend(self, call: int, deadline: Deadline) -> None:
        """Tell all ranks of this one's call, once, if it has waited for long enough."""
        rank = self._comm.rank
        limit = deadline.elapsed + deadline.remaining
        if self._heard[rank] >= call or deadline.elapsed < min(_PATIENCE, limit / 4):
            return
        self._heard[rank] = call
        word = np.array([call], np.int64)
        others = [other for other in range(self._comm.size) if other != rank]
        self._sent += [self._comm.Isend(word, other) for other in others]
        self._told += 1

    def missing(self, call: int) -> list[int]:
        """Return the ranks that did not tell of this call."""
        status = MPI.Status()
        while self._comm.Iprobe(status=status):
            self._receive(status.Get_source())
        return [rank for rank, heard in enumerate(self._heard) if heard < call]

    def _receive(self, source: int) -> None:
        word = np.zeros(1, np.int64)
        self._comm.Recv(word, source)
        self._received[source] += 1
        self._heard[source] = max(self._heard[source], int(word[0]))

    def free(self) -> None:
        """Free the communicator. Collective; all ranks have stopped waiting."""
        # None may be left: MPI would give it to the next communicator of this number.
        for source, told in enumerate(self._comm.allgather(self._told)):
            while source != self._comm.rank and self._received[source] < told:
                self._receive(source)
        MPI.Request.Waitall(self._sent)
        self._comm.Free()

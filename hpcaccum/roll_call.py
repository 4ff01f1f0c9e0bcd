"""Who has made a collective call, asked only when somebody has waited for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum.deadline import Deadline
    from hpcaccum.group import Group

# Seconds of waiting after which a rank tells the others that it is there: well before
# the first warning, and so rare that the messages, one to each rank, do not matter.
_PATIENCE = 5.0


class RollCall:
    """Ranks that wait tell each other so; those not heard of are missing. Collective.

    Nothing is sent while calls are fast, and nobody is asked: a rank that computes
    would not answer.
    """

    def __init__(self, group: Group) -> None:
        self._comm = group.comm.Dup()
        self._heard = [0] * group.size
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
        self._sent = [self._comm.Isend(word, other) for other in others]

    def missing(self, call: int) -> list[int]:
        """Return the ranks that did not tell of this call."""
        word, status = np.zeros(1, np.int64), MPI.Status()
        while self._comm.Iprobe(status=status):
            source = status.Get_source()
            self._comm.Recv(word, source)
            self._heard[source] = max(self._heard[source], int(word[0]))
        return [rank for rank, heard in enumerate(self._heard) if heard < call]

    def free(self) -> None:
        """Free the communicator. Collective; all ranks have stopped waiting."""
        self.missing(0)
        MPI.Request.Waitall(self._sent)
        self._comm.Free()

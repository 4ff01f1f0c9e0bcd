"""Messages that name the ranks which have not made a collective call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.mpi import Mailbox, Tag, duplicate

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
        self._comm = duplicate(group.comm)
        self._mailbox = Mailbox(self._comm, Tag.ARRIVAL)
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        # The last call that each rank has announced.
        self._calls = [0] * group.size

    def announce(self, call: int, deadline: Deadline) -> None:
        """Send the number of this rank's call to all ranks, once, after a long wait."""
        rank = self._comm.rank
        limit = deadline.elapsed + deadline.remaining
        if self._calls[rank] >= call or deadline.elapsed < min(_PATIENCE, limit / 4):
            return
        self._calls[rank] = call
        self._mailbox.send(self._others, call)

    def missing(self, call: int) -> list[int]:
        """Return the ranks that have not announced this call."""
        for source, announced in self._mailbox.receive():
            self._calls[source] = max(self._calls[source], announced)
        return [rank for rank, last in enumerate(self._calls) if last < call]

    def free(self) -> None:
        """Free the communicator. Collective; no rank may wait in a call any more."""
        self._mailbox.drain()
        self._comm.Free()

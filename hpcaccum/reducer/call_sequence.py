"""The sequence of a reducer's calls: their numbers, and waiting for other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import BrokenObjectError, format_ranks
from hpcaccum.mpi import Mailbox, Tag, duplicate

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group

    Ready = Callable[[], bool | None]


class CallSequence:
    """Counts the calls of one reducer, and waits in them for the other ranks.

    Calls of different ranks are paired in their order. The first one may begin after
    `watch` and `open`.

    Args:
        group: The ranks.
        name: Of the reducer; begins messages.

    Attributes:
        broken: Whether this rank is in a call that is not complete, or has left one.
            Other ranks may then still read and write this rank's memory.
        waited: Seconds that this rank has spent in calls.
        track: The order of these calls among the other collective calls of the group;
            counts the complete ones.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self.waited, self.broken = 0.0, False
        self._arrivals: Arrivals | None = None

    def watch(self, late: Callable[[], list[int] | None]) -> None:
        """Set how missing ranks are found. Collective."""
        self._late = late
        if late() is None:
            self._arrivals = Arrivals(self._group)

    def open(self, label: str) -> None:
        """Begin to count; in the same order on all ranks."""
        self.track = self._group.control.open_track(f"{label}: reduction")

    def __str__(self) -> str:
        """Name the call that comes next."""
        return f"{self._name}: reduction {self.track.calls + 1}"

    def check_usable(self) -> None:
        """Raise BrokenObjectError if an exception has ended a call."""
        if self.broken:
            raise BrokenObjectError(
                f"{self} was ended by an exception, and other ranks may still wait in "
                f"it; make a new reducer"
            )

    def wait(self, ready: Ready, *, moves_data: bool) -> None:
        """Wait in the next call until ``ready`` returns something other than None."""
        deadline, control = Deadline(None, self), self._group.control

        def check() -> None:
            if self._arrivals is not None:
                self._arrivals.announce(self.track.calls + 1, deadline)
            control.check(self.track, deadline)

        try:
            deadline.wait(ready, self._missing, check=check, moves_data=moves_data)
        except BaseException:
            control.depart(self.track)
            raise

    def _missing(self) -> str:
        late = self._late()
        if self._arrivals is not None:
            late = self._arrivals.missing(self.track.calls + 1)
        late = [rank for rank in late or [] if rank not in self._group.lost]
        text = f"{format_ranks(late)} of {self._group.size} to make the same call"
        return "; ".join(filter(None, [text, self.track.advice]))

    def close(self) -> None:
        """Forget the calls. Collective; no rank may wait in one any more."""
        self._group.control.close_track(self.track)
        if self._arrivals is not None:
            self._arrivals.free()


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

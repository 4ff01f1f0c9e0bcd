"""Waiting for other ranks in the calls of a reducer, which are counted."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.errors import BrokenObjectError, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group

    Ready = Callable[[], bool | None]


class CallSequence:
    """Counts the calls of one reducer, and waits in them for the other ranks.

    `broken` is whether this rank is in a call that is not complete, or has left one:
    others may still use its memory. `waited` are its seconds in calls. After `open`,
    the `track` orders these among the other collective calls of the group.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self.waited, self.broken = 0.0, False

    def open(self, label: str, late: Callable[[], list[int] | None]) -> None:
        """Begin to count; in the same order on all ranks.

        ``late`` returns the ranks that a call waits for; None if it cannot know.
        """
        self.track = self._group.control.open_track(f"{label}: reduction")
        self._late = late

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

        def look() -> bool | None:
            if (result := ready()) is None:
                control.check(self.track, deadline)
            return result

        try:
            deadline.wait(look, self._missing, moves_data=moves_data)
        except BaseException:
            control.depart(self.track)
            raise

    def _missing(self) -> str:
        if (late := self._late()) is None:
            late = self._group.control.absent(self.track)
        late = [rank for rank in late if rank not in self._group.lost]
        text = f"{format_ranks(late)} of {self._group.size} to make the same call"
        return "; ".join(filter(None, [text, self.track.advice]))


# About a millisecond where each rank has its own core; where ranks share cores, only a
# few, which leave the core to the others.
_LOOKS, _CROWDED_LOOKS = 3000, 100


class SpinWait:
    """Waits for other ranks in a reducer's call: spins at first. Collective."""

    def __init__(self, group: Group, calls: CallSequence) -> None:
        cores = group.node.allgather(os.sched_getaffinity(0))
        crowded = len(set().union(*cores)) < group.node.size
        self._looks = _CROWDED_LOOKS if crowded else _LOOKS
        yields = crowded or not group.single_node
        self._between = os.sched_yield if yields else None
        self._calls = calls
        self._progress: Callable[[], object] | None = None
        self._moves_data = False

    def moving_data(self, progress: Callable[[], object] | None = None) -> SpinWait:
        """Return one for what moves data, such as tests of MPI's requests.

        It calls ``progress`` before each look: a rank that only reads memory makes no
        progress in MPI, which ranks of other nodes may depend on.
        """
        other = copy.copy(self)
        other._moves_data, other._progress = True, progress
        if progress is not None:
            # Beside the time of a message to another node, yielding costs little.
            other._between = os.sched_yield
        return other

    def __call__(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` returns True."""
        progress, between = self._progress, self._between
        # A deadline costs microseconds, which most waits do not take.
        for _ in range(self._looks):
            if progress is not None:
                progress()
            if ready():
                return
            if between is not None:
                between()

        def look() -> bool | None:
            if progress is not None:
                progress()
            return ready() or None

        self._calls.wait(look, moves_data=self._moves_data)

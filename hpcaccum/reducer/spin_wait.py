"""Waiting for what takes microseconds, when sleeping would cost more than it saves."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group
    from hpcaccum.reducer.call_sequence import CallSequence

    Ready = Callable[[], bool]

# About a millisecond where each rank has its own core; where ranks share cores, only a
# few, which leave the core to the others.
_LOOKS, _CROWDED_LOOKS = 3000, 100


class SpinWait:
    """Waits for other ranks in a reducer's call: spins at first. Collective.

    Args:
        group: The ranks, on one node or on several.
        calls: What this rank waits in. It has the time limit, and names the missing
            ranks.
    """

    def __init__(self, group: Group, calls: CallSequence) -> None:
        cores = group.node.allgather(os.sched_getaffinity(0))
        crowded = len(set().union(*cores)) < group.node.size
        self._looks = _CROWDED_LOOKS if crowded else _LOOKS
        yields = crowded or not group.single_node
        self._between = os.sched_yield if yields else None
        self._calls = calls
        self._progress: Callable[[], object] | None = None
        self._moves_data = False

    def moving_data(self) -> SpinWait:
        """Return one for what moves data, such as tests of MPI's requests."""
        other = copy.copy(self)
        other._moves_data = True
        return other

    def progressing(self, progress: Callable[[], object]) -> SpinWait:
        """Return one that also calls ``progress`` before each look.

        A rank that only reads memory makes no progress in MPI, which ranks of other
        nodes may depend on.
        """
        other = self.moving_data()
        other._progress = progress
        # Beside the time of a message to another node, yielding costs little.
        other._between = os.sched_yield
        return other

    def __call__(self, ready: Ready) -> None:
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

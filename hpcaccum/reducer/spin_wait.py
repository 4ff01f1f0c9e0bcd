"""Waiting for what takes microseconds, before a nap would cost more than it saves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group

    Ready = Callable[[], bool]

# About a millisecond where each rank has a core of its own; a few turns for the others
# where it has not.
_LOOKS, _CROWDED_LOOKS = 3000, 100


class SpinWait:
    """Looks again and again whether the other ranks of a node are there. Collective.

    Args:
        group: The ranks, of one node or of several.
        progress: Called between two looks, for MPI's sake: a rank that looks at memory
            only stops those of other nodes that need its library's help.
    """

    def __init__(
        self, group: Group, progress: Callable[[], object] | None = None
    ) -> None:
        cores = group.node.allgather(os.sched_getaffinity(0))
        crowded = len(set().union(*cores)) < group.node.size
        self._looks = _CROWDED_LOOKS if crowded else _LOOKS
        # Beside the way to another node, a microsecond for others is little.
        self._yields = crowded or progress is not None or not group.single_node
        self._progress = progress

    def __call__(self, ready: Ready, wait: Callable[[Ready], None]) -> None:
        """Return when ``ready`` is true; leave it to ``wait`` if that takes long."""
        if self._progress is not None:
            ready = _with(self._progress, ready)
        for _ in range(self._looks):
            if ready():
                return
            if self._yields:
                os.sched_yield()
        wait(ready)


def _with(progress: Callable[[], object], ready: Ready) -> Ready:
    def look() -> bool:
        progress()
        return ready()

    return look

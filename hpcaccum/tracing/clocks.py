"""The clocks of nodes, compared with that of rank 0.

The first rank of each node that is not lost asks rank 0 for the time, several times.
The answer that came fastest counts: the offset lies within half of its round trip.

Source: F. Cristian, Probabilistic Clock Synchronization, 1989.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Tag, complete
from hpcaccum.spans import clock

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group

_QUESTIONS = 32
_CALL = "trace: clocks of the nodes"


class Offset(NamedTuple):
    """What to add to a node's clock to get that of rank 0, and its largest error.

    In seconds; measured ``at`` a time by the node's clock.
    """

    at: float
    seconds: float
    error: float


def measure(group: Group) -> Offset:
    """Return the offset of this rank's node. Collective."""
    present = group.gather_present(None, _CALL)
    nodes = [[rank for rank in ranks if rank in present] for ranks in group.nodes]
    first, *leaders = [ranks[0] for ranks in nodes if ranks]
    mine = Offset(clock(), 0.0, 0.0)
    if group.rank == first:
        for leader in leaders:
            _answer(group.comm, leader)
    elif group.rank in leaders:
        mine = _ask(group.comm, first)
    return group.gather_present(mine, _CALL)[nodes[group.node_number][0]]


def common_time(time: float, before: Offset, after: Offset) -> float:
    """Return a time of this node by the clock of rank 0.

    Between the two measurements, the offset is taken to grow evenly.
    """
    elapsed = max(after.at - before.at, 1e-9)
    drift = (after.seconds - before.seconds) / elapsed
    return time + before.seconds + drift * (time - before.at)


def _ask(comm: mpi4py_MPI.Intracomm, rank: int) -> Offset:
    found = []
    for _ in range(_QUESTIONS):
        answer, begun = np.empty(1), clock()
        question = comm.Isend(np.empty(0), rank, Tag.CLOCK)
        _wait([question, comm.Irecv(answer, rank, Tag.CLOCK)], rank)
        ended = clock()
        middle = (begun + ended) / 2
        found.append(Offset(middle, float(answer[0]) - middle, (ended - begun) / 2))
    return min(found, key=lambda offset: offset.error)


def _answer(comm: mpi4py_MPI.Intracomm, rank: int) -> None:
    for _ in range(_QUESTIONS):
        _wait([comm.Irecv(np.empty(0), rank, Tag.CLOCK)], rank)
        _wait([comm.Isend(np.array([clock()]), rank, Tag.CLOCK)], rank)


def _wait(requests: list[Any], rank: int) -> None:
    deadline = Deadline(None, _CALL)
    complete(requests, deadline, lambda: f"rank {rank} to make the same call")

"""Counts the messages of calls between nodes.

Nothing is timed: each call is counted when it need not wait, so that the counts are the
same in every run.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

from hpcaccum import Group, testing

# Elements of a gradient of float32; so many that no rank sends it at once, and one
# piece.
SIZE = 1 << 13


class CountedComm:
    """The communicator of agents, whose messages to other nodes are counted."""

    def __init__(self, agent: Any, counts: Counter[str]) -> None:
        self._comm, self._counts = agent.comm, counts
        self._home = agent.leaders[agent.node]

    def __getattr__(self, name: str) -> Any:
        """Return what is not counted."""
        return getattr(self._comm, name)

    def issend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.issend(message, rank, tag)

    def isend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.isend(message, rank, tag)

    def _count(self, message: Any, rank: int) -> None:
        if rank != self._home:
            size = len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            self._counts.update(requests=1, request_bytes=size)

    def Isend(self, data: Any, rank: int, tag: int) -> Any:
        self._counts.update(vectors=int(data.nbytes >= SIZE * 4))
        return self._comm.Isend(data, rank, tag)


def count_messages(group: Group, counts: Counter[str]) -> None:
    """Count the messages that this rank and its agent send to other nodes."""
    agent = testing.agent_of(group)
    agent.comm = CountedComm(agent, counts)

"""Counts the messages and the one-sided operations of calls between nodes.

Nothing is timed: each call is counted when it need not wait, so that the counts are the
same in every run.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hpcaccum import Group, testing
from hpcaccum.mpi.memory import atomic_words, region, windows, word_window

# Elements of a gradient of float32; so many that no rank sends it at once, and one
# piece.
SIZE = 1 << 13


class CountedWindow:
    """A window whose one-sided operations are counted.

    Operations that are complete together, at a flush, take one round trip.
    """

    def __init__(self, window: Any, counts: Counter[str]) -> None:
        self._window, self._counts = window, counts
        self._pending = False

    def __getattr__(self, name: str) -> Any:
        """Return what is not counted."""
        return getattr(self._window, name)

    def _count(self, nbytes: int) -> None:
        self._counts.update(operations=1, bytes=nbytes)
        self._pending = True

    def Fetch_and_op(self, origin: Any, *rest: Any) -> None:
        self._count(origin.nbytes)
        self._window.Fetch_and_op(origin, *rest)

    def Compare_and_swap(self, origin: Any, *rest: Any) -> None:
        self._count(origin.nbytes)
        self._window.Compare_and_swap(origin, *rest)

    def Get_accumulate(self, origin: Any, result: Any, *rest: Any) -> None:
        self._count(result.nbytes)
        self._window.Get_accumulate(origin, result, *rest)

    def Accumulate(self, origin: Any, *rest: Any) -> None:
        # With its datatype, it is a list.
        self._count((origin[0] if isinstance(origin, list) else origin).nbytes)
        self._window.Accumulate(origin, *rest)

    def Flush(self, root: int) -> None:
        self._counts.update(round_trips=int(self._pending))
        self._pending = False
        self._window.Flush(root)


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


@contextlib.contextmanager
def counted_windows(counts: Counter[str]) -> Iterator[None]:
    """Count the operations in all windows that are made in the block.

    With any library, several operations may take one round trip, and ranks of the
    root's node need no agent.
    """
    allocate = windows.allocate

    def counted(*args: Any) -> CountedWindow:
        return CountedWindow(allocate(*args), counts)

    with (
        mock.patch.object(word_window, "allocate", counted),
        mock.patch.object(region, "allocate", counted),
        mock.patch.object(atomic_words, "is_open_mpi", return_value=False),
    ):
        yield


def count_messages(group: Group, counts: Counter[str]) -> None:
    """Count the messages that this rank and its agent send to other nodes."""
    agent = testing.agent_of(group)
    agent.comm = CountedComm(agent, counts)

"""Messages between the ranks of a communicator that never block the sender."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.job.runtime import MPI
from hpcaccum.mpi.talk.requests import begun, is_complete, receive

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class Tag(IntEnum):
    """What a message on the communicator of a group is for."""

    CONTROL = 1
    HEARTBEAT = 2
    CLOCK = 3
    TRACE = 4


class Mailbox:
    """Sends and receives Python objects over a communicator, with a tag of its own.

    Messages of one rank arrive in the order in which they were sent. Those to a rank
    that has died are dropped.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._requests: list[Any] = []
        # Messages that have arrived, each after its sender.
        self._arrived: deque[tuple[int, Any]] = deque()
        # How many messages were sent to and received from each rank.
        self._sent = np.zeros(comm.size, np.int64)
        self._received = np.zeros_like(self._sent)
        # The request and the result of the exchange of `_sent`, once it has begun.
        self._counts: tuple[Any, Any] | None = None

    def send(
        self, ranks: Collection[int], message: Any, *, synchronous: bool = False
    ) -> list[Any]:
        """Send a message to some ranks; return the requests.

        The mailbox keeps the message until they are complete, as MPI may not copy a
        large one; if ``synchronous``, the ranks have received it then.
        """
        self._requests = [each for each in self._requests if not is_complete(each)]
        begin = self._comm.issend if synchronous else self._comm.isend
        sent = [begun(begin, message, rank, self._tag) for rank in ranks]
        for rank in ranks:
            self._sent[rank] += 1
        self._requests += sent
        return sent

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield the messages that have arrived, each with the rank that sent it.

        A message whose use raises an error is yielded again by the next call.
        """
        self._fetch()
        while self._arrived:
            yield self._arrived[0]
            self._arrived.popleft()

    def _fetch(self) -> None:
        """Receive what has arrived."""
        while (found := receive(self._comm, self._tag)) is not None:
            self._arrived.append(found)
            self._received[found[0]] += 1

    def drain(self) -> None:
        """Receive and discard all messages, before the communicator is freed.

        Collective. MPI may give its context id to a later communicator, which would
        receive them. After a timeout it can be called again.
        """
        if self._counts is None:
            # The request keeps the arrays for MPI.
            sent, expected = self._sent.copy(), np.zeros_like(self._sent)
            self._counts = self._comm.Ialltoall(sent, expected), expected
        Deadline(None, "freeing a communicator").wait(
            self._drained, lambda: f"all {self._comm.size} ranks to free it"
        )

    def _drained(self) -> bool | None:
        self._fetch()
        self._arrived.clear()
        assert self._counts is not None
        counted, expected = self._counts
        complete = counted.Test() and np.array_equal(self._received, expected)
        return (complete and MPI.Request.Testall(self._requests)) or None

"""Messages between the ranks of a communicator that never block the sender."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.runtime import MPI

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI as mpi4py_MPI


class Mailbox:
    """Sends and receives Python objects over a communicator.

    Messages of one rank arrive in the order in which they were sent.

    Args:
        comm: The communicator.
        tag: Of the messages; no others have it.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._requests: list[Any] = []
        # Messages to and from each rank.
        self._sent, self._received = [0] * comm.size, [0] * comm.size
        # The request and the result of the exchange of `_sent`, once it has begun.
        self._counts: tuple[Any, Any] | None = None

    def send(self, rank: int, message: Any) -> Any:
        """Send a message; return its request.

        The mailbox keeps the message until the other rank has received it, as MPI may
        not copy a large one.
        """
        request = self._comm.isend(message, rank, self._tag)
        self._requests = [each for each in self._requests if not each.Test()]
        self._requests.append(request)
        self._sent[rank] += 1
        return request

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield the messages that have arrived, each with the rank that sent it."""
        status = MPI.Status()
        probe = functools.partial(self._comm.improbe, MPI.ANY_SOURCE, self._tag, status)
        while (message := probe()) is not None:
            source = status.Get_source()
            self._received[source] += 1
            yield source, message.recv()

    def drain(self) -> None:
        """Receive and discard all messages, before the communicator is freed.

        Collective. MPI may give its context id to a later communicator, which would
        receive them. After a timeout it can be called again.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
        """
        if self._counts is None:
            # Kept after a timeout, as MPI still uses the arrays.
            sent, expected = np.array(self._sent), np.zeros_like(self._sent)
            self._counts = self._comm.Ialltoall(sent, expected), expected
        counted, expected = self._counts

        def drained() -> bool | None:
            for _ in self.receive():
                pass
            complete = counted.Test() and self._received == expected.tolist()
            return (complete and MPI.Request.Testall(self._requests)) or None

        Deadline(None, "freeing a communicator").wait(
            drained, lambda: f"all {self._comm.size} ranks to free it"
        )

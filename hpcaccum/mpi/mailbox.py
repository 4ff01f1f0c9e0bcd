"""Messages between the ranks of a communicator that never block the sender.

A signal handler may raise at any time. So all that belongs together is done in C,
between whose steps no handler runs: a message is sent, counted, and kept for MPI; or
it is received, counted, and kept for this rank.
"""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.runtime import MPI

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from mpi4py import MPI as mpi4py_MPI

_FIRST = operator.itemgetter(0)
_TEST = operator.methodcaller("Test")
_RECEIVE = operator.methodcaller("recv")
_SOURCE = operator.methodcaller("Get_source")


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
        # Messages that have arrived: pickled, the sender, nothing.
        self._arrived: deque[tuple[bytes, int, None]] = deque()
        # How many messages were sent to and received from each rank.
        self._sent = np.zeros(comm.size, np.int64)
        self._received = np.zeros_like(self._sent)
        # The request and the result of the exchange of `_sent`, once it has begun.
        self._counts: list[tuple[Any, Any]] = []

    def send(self, ranks: Collection[int], message: Any) -> list[Any]:
        """Send a message to all of some ranks, or to none if it is interrupted before.

        The mailbox keeps the message until they have received it, as MPI may not copy a
        large one.

        Returns:
            The requests.
        """
        # First: pickling may run Python code, as unpickling may in `receive`.
        data = pickle.dumps(message)
        self._requests[:] = itertools.filterfalse(_TEST, self._requests)
        sent = map(self._comm.isend, repeat(data), ranks, repeat(self._tag))
        counted = map(np.add.at, repeat(self._sent), ranks, repeat(1))
        self._requests.extend(map(_FIRST, zip(sent, counted, strict=False)))
        return self._requests[len(self._requests) - len(ranks) :]

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield the messages that have arrived, each with the rank that sent it.

        A message whose use is interrupted is yielded again by the next call.
        """
        self._fetch()
        while self._arrived:
            entry = self._arrived[0]
            yield entry[1], pickle.loads(entry[0])
            # A signal handler may have received messages, too. None runs from here on.
            if self._arrived and self._arrived[0] is entry:
                self._arrived.popleft()

    def _fetch(self) -> None:
        """Receive what has arrived."""
        # Ranks that wait do this again and again: quickly, if nothing has.
        if not self._comm.Iprobe(MPI.ANY_SOURCE, self._tag):
            return
        status = MPI.Status()
        probe = functools.partial(self._comm.improbe, MPI.ANY_SOURCE, self._tag, status)
        data = map(_RECEIVE, iter(probe, None))
        # What the probe has found sets the status, before these look at it.
        sources, counted = (map(_SOURCE, repeat(status)) for _ in range(2))
        count = map(np.add.at, repeat(self._received), counted, repeat(1))
        self._arrived.extend(zip(data, sources, count, strict=False))

    def drain(self) -> None:
        """Receive and discard all messages, before the communicator is freed.

        Collective. MPI may give its context id to a later communicator, which would
        receive them. After a timeout it can be called again.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
        """
        if not self._counts:
            # The request keeps the arrays for MPI.
            sent, expected = self._sent.copy(), np.zeros_like(self._sent)
            begun = map(self._comm.Ialltoall, (sent,), (expected,))
            self._counts.extend(zip(begun, (expected,), strict=True))
        Deadline(None, "freeing a communicator").wait(
            self._drained, lambda: f"all {self._comm.size} ranks to free it"
        )

    def _drained(self) -> bool | None:
        self._fetch()
        self._arrived.clear()
        [(counted, expected)] = self._counts
        complete = counted.Test() and np.array_equal(self._received, expected)
        return (complete and MPI.Request.Testall(self._requests)) or None

"""Sums of short vectors over all ranks, in messages between pairs of ranks.

In each round a rank and another one exchange what they have summed so far, which
doubles the ranks whose vectors are in the sums (recursive doubling: Thakur,
Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH,
2005). A message also carries a number that should be the same on all ranks.

MPI's allreduce cannot compare such numbers, so they would need a second call, or digits
whose sums are exact. And the nonblocking one, the only one with a time limit, takes
longer for 4 KiB on 4 hosts that are joined by TCP: 4 times as long with MPICH, 1.3
times with Open MPI, whose trees have twice the rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.mpi import MPI
from hpcaccum.summation import Quiet

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

_WORD = 8


class _Message:
    """What a message consists of, one after the other in ``data``.

    Attributes:
        data: All of its bytes.
        vector: The sums.
        weight: The sum of the weights, in a sequence of one.
        numbers: The number to compare, and whether others differ from it.
    """

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        nbytes = size * dtype.itemsize
        end = -(-nbytes // _WORD) * _WORD
        self.data = np.zeros(end + 3 * _WORD, np.uint8)
        self.vector: Array = self.data[:nbytes].view(dtype)
        words: Any = self.data[end:]
        # Python reads a memoryview several times as fast as an array.
        self.weight = memoryview(words[:_WORD]).cast("d")
        self.numbers = memoryview(words[_WORD:]).cast("q")


class _Step(NamedTuple):
    """What a rank does with another one: it sends, receives, or both."""

    sent: _Message | None
    send: Any
    received: _Message | None
    receive: Any


class RecursiveDoubling:
    """Sums vectors and weights over all ranks, and compares numbers.

    The sums have the same bits on all ranks and in each call: two ranks that exchange
    their sums add the same two numbers.

    Args:
        comm: The ranks, with no other messages between two of them.
        size, dtype: Of the vectors.

    Attributes:
        vector: That of this rank before a call, and the sum after it.
    """

    def __init__(
        self, comm: mpi4py_MPI.Intracomm, size: int, dtype: np.dtype[Any]
    ) -> None:
        self._total = _Message(size, dtype)
        self.vector = self._total.vector
        self._steps = [
            self._step(comm, peer, sends, receives)
            for peer, sends, receives in pairings(comm.rank, comm.size)
        ]
        self._quiet, self._at = Quiet(), 0
        self._sends = [each.send for each in self._steps if each.sent]
        self._receives = [each.receive for each in self._steps if each.received]
        # Whether another rank sums for this one, and then sends it the sums.
        self._extra = comm.rank >= _core(comm.size)

    def _step(
        self, comm: mpi4py_MPI.Intracomm, peer: int, sends: bool, receives: bool
    ) -> _Step:
        def message() -> _Message:
            return _Message(self.vector.size, self.vector.dtype)

        sent, received = message() if sends else None, message() if receives else None
        send = comm.Send_init(sent.data, peer) if sent else None
        receive = comm.Recv_init(received.data, peer) if received else None
        return _Step(sent, send, received, receive)

    def begin(self, number: int, weight: float) -> None:
        """Begin to sum `vector` and a weight, and to compare a number of 64 bits."""
        self._total.weight[0] = weight
        self._total.numbers[0], self._total.numbers[1] = number, False
        MPI.Prequest.Startall(self._receives)
        self._at = 0
        self._send()

    def _send(self) -> None:
        if self._at < len(self._steps):
            step = self._steps[self._at]
            if step.sent is not None:
                step.sent.data[:] = self._total.data
                step.send.Start()

    def test(self) -> bool:
        """Continue with what has arrived; return whether all is complete."""
        while self._at < len(self._steps):
            step = self._steps[self._at]
            if step.received is not None:
                if not step.receive.Test():
                    return False
                self._take(step.received)
            self._at += 1
            self._send()
        return bool(MPI.Prequest.Testall(self._sends))

    def _take(self, received: _Message) -> None:
        """Add what another rank has summed, or copy it."""
        total = self._total
        if self._extra:
            total.data[:] = received.data
            return
        self._quiet(np.add, total.vector, received.vector, total.vector)
        total.weight[0] += received.weight[0]
        differ = total.numbers[0] != received.numbers[0]
        total.numbers[1] |= differ or received.numbers[1]

    @property
    def weight(self) -> float:
        """The sum of all weights."""
        return float(self._total.weight[0])

    @property
    def agreed(self) -> bool:
        """Whether all ranks had the same number; the same on all ranks."""
        return not self._total.numbers[1]

    def free(self) -> None:
        """Free the requests, of which none may be under way."""
        for request in self._sends + self._receives:
            request.Free()


def _core(size: int) -> int:
    """Return the largest power of 2 that is not above ``size``."""
    return 1 << (size.bit_length() - 1)


def pairings(rank: int, size: int) -> list[tuple[int, bool, bool]]:
    """Return with whom a rank exchanges, and whether it sends and receives."""
    core = _core(size)
    if rank >= core:
        return [(rank - core, True, False), (rank - core, False, True)]
    pairs = [(rank ^ 1 << bit, True, True) for bit in range(core.bit_length() - 1)]
    if rank + core < size:
        return [(rank + core, False, True), *pairs, (rank + core, True, False)]
    return pairs

"""Exchanges between the ranks of a test run, whatever the tests do to MPI."""

from __future__ import annotations

import functools
import pickle
import time
from typing import Any

import numpy as np
from mpi4py import MPI


class Exchange:
    """Collective exchange of small objects over a private communicator.

    A rank that waits here polls: it burns no core that the others need, and a
    `Watchdog` can show where it stands.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()

    def dup(self) -> MPI.Intracomm:
        """Return a communicator of all ranks, for the caller to free."""
        # Dup would spin; four ranks on two cores then lose 15 ms here, every time.
        comm, request = self._comm.Idup()
        _wait(request)
        return comm

    def gather(self, value: Any = None) -> list[Any]:
        """Return the values of all ranks, in rank order; None costs little."""
        payload = np.frombuffer(b"" if value is None else pickle.dumps(value), np.uint8)
        sizes = np.zeros(self._comm.size, np.int64)
        _wait(self._comm.Iallgather(np.array([payload.size], np.int64), sizes))
        if not sizes.any():
            return [None] * self._comm.size
        everything = np.empty(sizes.sum(), np.uint8)
        _wait(self._comm.Iallgatherv(payload, (everything, sizes.tolist())))
        parts = np.split(everything, np.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) if part.size else None for part in parts]


@functools.cache
def world(purpose: str) -> Exchange:
    """Return the exchange of all ranks for that purpose; the first call is collective.

    What one test exchanges in confusion cannot be taken for the outcome of another.
    """
    return Exchange(MPI.COMM_WORLD)


def _wait(request: MPI.Request) -> None:
    polls = 0
    while not request.Test():
        # A nap from the start would cost every test several milliseconds.
        time.sleep(0 if polls < 100 else 0.0005)
        polls += 1

"""What the ranks of a test run exchange, whatever the tests do to MPI."""

from __future__ import annotations

import functools
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis.errors
import numpy as np
import pytest

from hpcaccum.mpi import MPI, AtomicWords

from ..common import WAIT as WAIT
from .watchdog import failing


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


def meet(value: Any = None) -> list[Any]:
    """Wait for all ranks; return their values, in rank order. Collective."""
    return world("tests").gather(value)


def for_some_pause(check: Callable[[float], bool]) -> bool:
    """Whether ``check(seconds)`` holds on all ranks for one of some pauses. Collective.

    A busy machine may hold back a rank that should wait, for longer than a pause.
    """
    return any(all(meet(check(seconds))) for seconds in (0.1, 0.5, 2.5))


def add_often(
    words: AtomicWords, index: int, value: int, until: Callable[[], object]
) -> None:
    """Add to a word again and again, with a pause only after 500 additions.

    A call of `AtomicWords` yields the core after each, so two of them rarely overlap.
    For a rank of another node, an agent makes them.
    """
    origin, results = np.array([value]), np.empty((500, 1), np.int64)
    while not until():
        if not words.direct:
            words.fetch_add(index, value)
            continue
        root, place = words._window_root, words._first + index
        for result in results:
            words._window.Fetch_and_op(origin, result, root, place, MPI.SUM)
        words._window.Flush(root)


def together(test: Callable[..., None]) -> Callable[..., None]:
    """Make one call of ``test`` fail on all ranks if it fails on one. Collective.

    Needed under `hypothesis.given`, which calls a test many times: a rank that alone
    fails an example would look for a smaller one while the others go on.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        failure = None
        try:
            test(*args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise  # an assumption: it does not hold on any rank
        except (Exception, pytest.fail.Exception):
            failure = traceback.format_exc()
        # Raised outside the except clause: hypothesis distinguishes failures by their
        # context too, and they must be one failure on all ranks.
        with failing(failure):
            failures = world("tests").gather(failure)
        for rank, text in enumerate(failures):
            if text:
                raise AssertionError(f"[rank {rank}] {text}")

    return run

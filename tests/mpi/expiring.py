"""A wait for some ranks that times out as soon as all other ranks wait.

A short timeout would have to be long enough for the slowest rank, which is a matter of
luck on a busy machine, and every test would take that long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

from hpcaccum import WaitTimeoutError, deadline
from tests import internals

from ..common import VAIN, WAIT
from .support import meet
from .training import raised

# Looks at the clock, between two of which a rank does all that it does while it waits.
_LOOKS = 20


class _Clock:
    """Jumps, in step with the clocks of the other ranks, while this rank waits.

    First to half of the limit: there ranks announce to each other that they wait. The
    jumps by nothing leave time for what was announced to arrive.
    """

    def __init__(self, waiting: MPI.Intracomm) -> None:
        self._waiting, self._offset, self._looks = waiting, 0.0, 0
        self._jumps = [0.0, WAIT / 2, 0.0, 0.0, WAIT]
        self._request: MPI.Request | None = None

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self._look()
        return time.monotonic() + self._offset

    def _look(self) -> None:
        self._looks += 1
        if self._request is None and self._looks >= _LOOKS and self._jumps:
            self._request = self._waiting.Ibarrier()
        elif self._request is not None and self._request.Test():
            self._offset += self._jumps.pop(0)
            self._request, self._looks = None, 0


@contextlib.contextmanager
def times_out_without(comm: MPI.Intracomm, *late: int) -> Iterator[None]:
    """Let the next wait time out, on all other ranks, when these all wait. Collective.

    Not for pulls: ranks with an agent or a server wait for its notice, without a clock.

    Args:
        comm: All ranks.
        late: The ranks that do not wait.
    """
    waiting = comm.Split(comm.rank in late, comm.rank)
    clock = time if comm.rank in late else _Clock(waiting)
    patched = SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep)
    with mock.patch.object(deadline, "time", patched):
        yield
    waiting.Free()


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let ranks report early that they wait: those that move data keep cores busy."""
    with internals.limits(patience=0.03):
        yield


@pytest.fixture(name="in_vain")
def in_vain_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a call time out, and returns the message."""

    def call(
        do: Callable[..., Any], *args: Any, seconds: float = VAIN, **kwargs: Any
    ) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("HPCACCUM_TIMEOUT", str(seconds))
            error = raised(do, *args, **kwargs)
        assert type(error) is WaitTimeoutError
        return str(error)

    return call


def missed_by(
    late: int, comm: MPI.Intracomm, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Have all ranks but one make a call; return its error, None there. Collective."""
    error = None
    with times_out_without(comm, late):
        if comm.rank != late:
            error = raised(call, *args, **kwargs)
    meet()
    return error

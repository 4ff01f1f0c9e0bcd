"""What the tests of this directory use: how long to wait, how to fail together."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis.errors
import numpy as np
import pytest

from hpcaccum.mpi import MPI, AtomicWords

from ..common import WAIT as WAIT
from .exchange import world
from .watchdog import failing


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

"""The harness where all is well; tests/system/test_harness_failures.py has the rest."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from .conftest import wrong_size
from .exchange import world
from .outcome import Outcome, merge
from .support import WAIT, together

pytestmark = pytest.mark.any_size


def outcome(name, text="", skipped_at=None):
    return Outcome(name, text, text, skipped_at, None)


def report(name, longrepr=None):
    location = ("test_x.py", 1, "test_x")
    return pytest.TestReport("test_x", location, {}, name, longrepr, "call")


def test_ranks_gather_the_values_of_all(rank, size):
    found = world("tests").gather("x" * rank)

    assert found == ["x" * r for r in range(size)]


def test_silence_is_heard_as_none(rank, size):
    assert world("tests").gather() == [None] * size
    assert world("tests").gather(7 if rank == 0 else None) == [7] + [None] * (size - 1)


def test_comm_is_of_all_ranks_and_not_the_world(comm, rank, size):
    assert (comm.rank, comm.size) == (rank, size)
    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_a_failure_of_one_rank_is_that_of_all():
    passed = report("passed")
    merge(passed, [None, outcome("failed", "E  rank is 1")])

    assert passed.failed
    assert "[rank 1]\nE  rank is 1" in passed.longreprtext


def test_equal_failures_of_ranks_are_reported_once():
    failed = report("failed", "E  no")
    merge(failed, [outcome("failed", "E  no"), None, outcome("failed", "E  no")])

    assert failed.longreprtext.count("E  no") == 1
    assert "[ranks 0, 2]" in failed.longreprtext


def test_a_skip_of_one_rank_is_that_of_all():
    passed = report("passed")
    merge(passed, [None, outcome("skipped", "", ("test_x.py", 1, "Skipped: no disk"))])

    assert passed.skipped
    assert passed.longrepr == ("test_x.py", 1, "[rank 1] Skipped: no disk")


def test_failing_outweighs_skipping():
    skipped = report("skipped", ("test_x.py", 1, "Skipped: no disk"))
    merge(skipped, [outcome("skipped"), outcome("failed", "E  no")])

    assert skipped.failed


def test_sizes_a_test_is_marked_for():
    assert wrong_size(3) is None
    assert wrong_size(3, 3) is None
    assert wrong_size(3, 2) == "needs at most 2 ranks, has 3"
    assert wrong_size(1, min=2) == "needs 2 ranks, has 1"
    assert wrong_size(3, min=2, max=3) is None
    assert wrong_size(4, max=3) == "needs at most 3 ranks, has 4"


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9)))
@together
def test_hypothesis_draws_alike_on_all_ranks(numbers):
    assert world("tests").gather(numbers) == [numbers] * MPI.COMM_WORLD.size


def test_together_raises_on_all_ranks_what_one_raised(rank, size):
    @together
    def fails_on_the_last():
        if rank == size - 1:
            raise KeyError(rank)

    with pytest.raises(AssertionError, match=rf"\[rank {size - 1}\] Traceback"):
        fails_on_the_last()


def test_wait_is_well_below_the_time_limit(pytestconfig):
    limit = float(pytestconfig.getini("mpi_time_limit"))

    assert limit >= 2 * WAIT


def test_a_signal_does_not_fail_a_rank_that_yields():
    signals = []
    before = signal.signal(signal.SIGALRM, lambda *_: signals.append(None))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
    try:
        while len(signals) < 300:
            os.sched_yield()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Ranks of several nodes that submit at the same time do not wait for each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hpcaccum import ConditionalAccumulator
from hpcaccum.mpi import AtomicWords
from hpcaccum.server import BoundedStalenessInbox

from .acting import at
from .growth import counted_windows
from .on_nodes import group_on_nodes  # noqa: F401

GRADIENT = np.ones(2, np.float32)


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def acc(group, counts):
    with counted_windows(counts):
        made = ConditionalAccumulator("float32", (2,), comm=group)
    yield made
    made.free()


def round_trips(counts, rank, do):
    """Have a rank act; return the result, and the round trips that it took."""

    def counted():
        counts.clear()
        return do(), counts["round_trips"]

    return at(rank, counted)


def wait_for(acc, wanted):
    """Let STATE be as while a take waits for so many gradients."""
    protocol = acc._protocol
    state = protocol.state()
    assert protocol.swap(state, state._replace(waiting=1, number=wanted))


def stop_waiting(acc, wanted):
    protocol = acc._protocol
    state = protocol.state()
    assert protocol.swap(state, state.not_waiting(wanted))


def end_round(acc, count):
    total = at(0, acc.take_grad, count)
    assert (total == 1).all()


@pytest.mark.parametrize("waiting", [False, True])
def test_admission_is_one_round_trip_in_any_order(acc, group, counts, size, waiting):
    far = group.nodes[-1][-1]
    others = [rank for rank in range(size) if rank != far]
    # In each round another number of ranks comes first, which `far` does not know.
    for step, first in enumerate([0, len(others), 0, len(others) // 2]):
        if waiting:
            at(0, wait_for, acc, size + 1)
        for rank in others[:first]:
            assert at(rank, acc.apply_grad, GRADIENT, step)
        receipt, trips = round_trips(
            counts, far, lambda step=step: acc.apply_grad(GRADIENT, step)
        )
        assert (receipt.accepted, receipt.global_step) == (True, step)
        # One for the admission, one for the record. At first, the rank knows nothing.
        assert trips == 2 or (step == 0 and waiting)
        for rank in others[first:]:
            assert at(rank, acc.apply_grad, GRADIENT, step)
        if waiting:
            at(0, stop_waiting, acc, size + 1)
        end_round(acc, size)
    assert acc.statistics().tally.accepted == (4,) * size


def test_without_a_pipeline_one_value_is_tried_at_a_time(
    group, counts, size, monkeypatch
):
    with counted_windows(counts, pipelined=False):
        acc = ConditionalAccumulator("float32", (2,), comm=group)
    # It would take Open MPI three times as long as a compare-and-swap.
    monkeypatch.delattr(AtomicWords, "exchange")
    far = group.nodes[-1][-1]
    others = [rank for rank in range(size) if rank != far]
    # Each operation takes a round trip: of the admission, a mark, a counter, a record.
    for step, before, trips in [(0, 0, 4), (1, len(others), 5), (2, len(others), 4)]:
        for rank in others[:before]:
            assert at(rank, acc.apply_grad, GRADIENT, step)
        found = round_trips(
            counts, far, lambda step=step: acc.apply_grad(GRADIENT, step)
        )
        assert (bool(found[0]), found[1]) == (True, trips)
        for rank in others[before:]:
            assert at(rank, acc.apply_grad, GRADIENT, step)
        end_round(acc, size)
    assert acc.statistics().tally.accepted == (3,) * size
    monkeypatch.undo()
    acc.free()


@pytest.mark.parametrize("local_step", [2**40, 2**63 - 1])
def test_a_step_far_ahead_is_no_guess_of_the_round(acc, group, counts, local_step):
    far = group.nodes[-1][-1]
    for step in range(3):
        receipt, trips = round_trips(
            counts, far, lambda: acc.apply_grad(GRADIENT, local_step)
        )
        assert (receipt.accepted, receipt.global_step) == (True, step)
        # It finds out that the round is another one.
        assert trips == 2 + (step > 0)
        end_round(acc, 1)


@pytest.mark.parametrize("waiting", [False, True])
def test_a_gradient_is_admitted_once(acc, group, size, waiting):
    # Each value that is tried after one that succeeds is one that STATE had before.
    far = group.nodes[-1][-1]
    protocol = acc._protocol
    if waiting:
        at(0, wait_for, acc, 6)
    for count in range(1, 5):
        admitted = at(far, protocol.admit, GRADIENT, 0)
        assert admitted[0]
        state = at(0, protocol.state)
        assert state.number == (6 - count if waiting else count)


def test_withdrawn_gradients_do_not_lead_to_a_second_admission(acc, group):
    far, protocol = group.nodes[-1][-1], acc._protocol
    at(0, wait_for, acc, 6)
    for rank in (far, 0, 0):
        assert at(rank, protocol.admit, GRADIENT, 0)[0]
    before = at(0, protocol.state)
    # As if other ranks withdrew gradients between two swaps of one admission.
    assert at(0, protocol.swap, before, before.withdrawn().withdrawn())
    state = at(0, protocol.state)

    tried = at(far, protocol._likely, before, False)
    assert before in tried
    assert state not in tried
    assert state._replace(changes=before.changes) in tried


@pytest.fixture
def inbox(request, group, counts):
    """Make an inbox to which all ranks but `far` have submitted.

    Its largest lag is that of the test; None: too small by one for one more gradient.
    """
    with counted_windows(counts):
        max_lag = group.size - 2 if request.param is None else request.param
        made = BoundedStalenessInbox(group, 0, 2, "float32", max_lag=max_lag)
    for rank in set(range(group.size)) - {group.nodes[-1][-1]}:
        assert at(rank, submit, made)
    yield made
    made.free()


def submit(inbox):
    inbox.slot()[:] = 1
    return inbox.submit(0)


@pytest.mark.parametrize("inbox", [3, 100], indirect=True)
def test_submission_is_one_round_trip_in_any_order(inbox, group, counts, size):
    far = group.nodes[-1][-1]
    receipt, trips = round_trips(counts, far, lambda: submit(inbox))
    # The step that `far` has is not that of the inbox, but within reach.
    assert (receipt.accepted, receipt.global_step) == (True, size - 1)
    assert trips == 2
    assert inbox.tally().accepted == (1,) * size


@pytest.mark.parametrize("inbox", [None], indirect=True)
def test_a_submission_beyond_the_bound_is_refused(inbox, group, size):
    receipt = at(group.nodes[-1][-1], submit, inbox)
    assert (receipt.accepted, receipt.lag) == (False, size - 1)
    assert at(0, lambda: inbox.step) == size - 1

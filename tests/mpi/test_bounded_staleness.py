"""BoundedStalenessInbox: the order of admission is the order of application."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from hpcaccum import (
    EverybodyLeftError,
    Group,
    InvalidArgumentError,
    Receipt,
    WaitTimeoutError,
)
from hpcaccum.deadline import Deadline
from hpcaccum.server import Parameters
from hpcaccum.server.bounded_staleness import BoundedStalenessInbox

from .acting import until
from .serving import next_total
from .support import WAIT
from .training import meet, raised, turns

SIZE = 5


@pytest.fixture(params=["first", "last"])
def host(request, size):
    if request.param == "last" and size == 1:
        pytest.skip("one rank is both first and last")
    return 0 if request.param == "first" else size - 1


@pytest.fixture
def make(comm, host):
    """Return a function that makes an inbox; all are freed at the end."""
    made = []

    def make(dtype=np.float64, **options):
        made.append(BoundedStalenessInbox(Group.of(comm), host, SIZE, dtype, **options))
        return made[-1]

    yield make
    for queue in made:
        queue.free()


def submit(queue, value, local_step=0):
    queue.slot()[:] = value
    return queue.submit(local_step)


def applied(queue, step, timeout=WAIT):
    gradient = next_total(queue, step, SIZE, timeout)
    assert (gradient == gradient[0]).all()
    return float(gradient[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_gradients_are_applied_in_the_order_of_admission(make, host, rank, size, dtype):
    queue = make(dtype)
    order = [*range(size)[::-2], *range(size)[-2::-2]]
    receipts = turns(order, lambda turn: submit(queue, 10 * rank + turn))
    found = None
    if rank == host:
        found = [applied(queue, step) for step in range(size)]
    meet()

    assert [receipt.global_step for receipt in receipts] == list(range(size))
    if rank == host:
        assert found == [10 * r + turn for turn, r in enumerate(order)]


def test_lag_counts_what_is_admitted_and_not_yet_applied(make, size):
    queue = make()
    receipts = turns(range(size), lambda turn: submit(queue, 1))

    assert [receipt.lag for receipt in receipts] == list(range(size))
    assert queue.step == size


@pytest.mark.parametrize("max_lag", [-1, 0, 1, 2, math.inf])
def test_admitted_if_and_only_if_lag_is_within_the_bound(make, host, rank, max_lag):
    queue, step = make(max_lag=max_lag), 0
    for lag in range(-1, 5):

        def act(_, local_step=step - lag):
            return submit(queue, 1, local_step), queue.step

        [(receipt, new)] = turns([0], act)
        if rank == host and receipt:
            applied(queue, step)

        assert receipt == Receipt(lag <= max_lag, step - lag, step)
        assert new == step + receipt.accepted
        step = new


def test_a_dropped_gradient_changes_nothing_but_the_count(make, host, rank, size):
    queue = make(max_lag=0)
    turns([0], lambda _: submit(queue, 7, 0))
    dropped = turns([size - 1], lambda _: submit(queue, 8, 0) if size > 1 else None)
    step = queue.step
    tally = queue.tally()
    if rank == host:
        assert applied(queue, 0) == 7
        assert isinstance(
            raised(applied, queue, 1, timeout=0), WaitTimeoutError
        )  # nothing more
    meet()

    assert step == 1
    if size > 1:
        assert dropped == [Receipt(False, 0, 1)]
        assert tally.accepted == (1, *[0] * (size - 1))
        assert tally.dropped == (*[0] * (size - 1), 1)
        assert tally.lags == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("max_lag", "least"), [(2, 5), (0, 7), (-1, 7), (-3, 7), (7, 0)]
)
def test_step_at_which_a_gradient_would_have_been_in_time(make, max_lag, least):
    # With a negative bound no gradient is in time, so no rank waits for a later step.
    queue = make(max_lag=max_lag)

    assert queue.useful(7) == least


def test_all_at_once_are_admitted_one_after_the_other(make, host, rank, size):
    queue = make()
    for call in range(8):
        meet()
        mine = submit(queue, 100 * rank + call, queue.step)
        receipts = meet(mine)
        if rank == host:
            found = [applied(queue, call * size + i) for i in range(size)]
            order = sorted(range(size), key=lambda r: receipts[r].global_step)
            assert found == [100 * r + call for r in order]
        steps = sorted(receipt.global_step for receipt in receipts)
        assert steps == list(range(call * size, (call + 1) * size))


def test_of_all_at_once_only_one_is_fresh(make, host, rank, size):
    queue = make(max_lag=0)
    for call in range(8):
        meet()
        receipts = meet(submit(queue, rank, call))
        winner = [r for r, receipt in enumerate(receipts) if receipt]
        if rank == host:
            assert [applied(queue, call)] == winner
        assert len(winner) == 1
        meet()

    assert sum(queue.tally().dropped) == 8 * (size - 1)


@pytest.mark.parametrize("max_lag", [10**6, math.inf])
def test_no_two_are_admitted_at_one_step(make, rank, size, max_lag):
    queue, calls = make(max_lag=max_lag), 1000
    meet()
    steps = [queue.submit(0).global_step for _ in range(calls)]
    everybody = np.sort(np.concatenate(meet(np.array(steps))))

    assert steps == sorted(steps)
    assert (everybody == np.arange(calls * size)).all()
    assert queue.step == calls * size


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_first_guess_of_the_step_may_be_wrong(make, host, rank, size, ahead):
    # Also if a gradient is said to be of a step that does not exist yet.
    queue = make(max_lag=2)
    turns([0], lambda _: submit(queue, 1, 0))
    if rank == host:
        applied(queue, 0)
    receipts = turns([size - 1], lambda _: submit(queue, 2, 1 + ahead))
    if rank == host:
        assert applied(queue, 1) == 2
    # Rank 0 has seen step 1 last, which is too late already, but not what it gets.
    late = turns([0], lambda _: submit(queue, 3, -2))

    assert receipts == [Receipt(True, 1 + ahead, 1)]
    assert late == [Receipt(False, -2, 2)]
    assert queue.step == 2


def test_gradients_stay_on_the_node_of_their_rank(
    make, comm, host, rank, size, monkeypatch
):
    queue, group, calls = make(), Group.of(comm), []
    window = queue.words._window
    monkeypatch.setattr(queue.words, "_window", Calls(window, calls))
    mine = queue.slot()
    mine[:] = rank
    calls.clear()
    queue.submit(0)

    meet()
    # Other ranks see the slot itself, on its node, and nothing but words has moved.
    for other in range(size):
        here = other in group.node_ranks
        assert queue.parts.is_here(other) is (group.single_node or here)
        if here:
            assert (queue._view(other) == other).all()
    waits = [name for name in calls if name in WAITS]
    ranks = group.node_ranks
    if host not in ranks or group.single_node:
        # An agent makes the changes, or memory is shared.
        assert not waits or size == 1
    elif rank == host:
        # For itself if it is alone, as do the submissions that its agent makes.
        assert set(waits) == ({"Flush"} if len(ranks) == 1 else set())
    else:
        assert waits == ["Flush"]


# The calls of MPI that wait for another rank, and those that move vectors.
WAITS = ("Flush", "Put", "Get")


class Calls:
    """A window that notes what is called."""

    def __init__(self, window, calls):
        self._window, self._calls = window, calls

    def __getattr__(self, name):
        self._calls.append(name)
        return getattr(self._window, name)


def test_a_slot_is_free_again_when_it_was_applied(make, host, rank, size, monkeypatch):
    queue = make()
    worker = size - 1
    turns([worker], lambda _: submit(queue, 3))
    if rank == worker:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.05")
        error = raised(queue.slot)
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
        assert type(error) is WaitTimeoutError
        assert "update 1, this rank's last" in str(error)
    meet()
    if rank == host:
        assert applied(queue, 0) == 3
    meet()
    # A rank that has the parameters of that update asks nobody.
    with monkeypatch.context() as patch:
        patch.setattr(queue.words, "read", None)
        queue.slot(1)
    turns([worker], lambda _: submit(queue, 4))
    if rank == host:
        assert applied(queue, 1) == 4
    meet()


def test_a_gradient_that_is_admitted_and_not_written_is_waited_for(
    make, host, rank, size
):
    queue = make()
    if rank == size - 1:
        queue._queue.admit(0, queue._admission)
    queue.leave()
    meet()
    if rank == host:
        error = raised(applied, queue, 0, timeout=0)
        assert type(error) is WaitTimeoutError
        assert "update 1, admitted, to be written" in str(error)
    meet()


def test_a_gradient_that_is_known_may_lose_its_place(make, host, rank, size):
    # Servers may have made its update before the host uses it.
    queue, found = make(), []
    turns(range(size), lambda _: submit(queue, rank))
    if rank == host:
        assert [queue.following(step).step for step in range(size)] == [*range(size)]
        assert queue.following(size) is None
    meet()

    def submit_again(_):
        queue.slot(size)
        return queue.submit(size)

    receipts = turns(range(size), submit_again)
    if rank == host:
        for step in range(2 * size):
            queue.next(step, Deadline(WAIT, ""), lambda batch: found.append(batch))
    meet()

    assert [each.global_step for each in receipts] == [*range(size, 2 * size)]
    if rank == host:
        assert [batch.places for batch in found] == 2 * [[(r, 0)] for r in range(size)]


def test_a_slot_is_free_when_the_next_gradient_is_wanted(make, host, rank):
    # The root was interrupted before it could say so.
    queue = make()
    turns([0], lambda _: submit(queue, 1))
    if rank == host:

        def use(batch):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            queue.next(0, Deadline(WAIT, ""), use)
        assert isinstance(raised(applied, queue, 1, timeout=0), WaitTimeoutError)
    meet()
    [receipt] = turns([0], lambda _: submit(queue, 2))

    assert receipt.global_step == 1


@pytest.mark.ranks(min=2)
def test_an_interrupted_gradient_may_have_been_applied(
    make, host, rank, size, monkeypatch
):
    queue, slow = make(), (host + 1) % size
    # What counts a gradient that is in its place, on this rank or by an agent.
    name = "post" if queue.words.unaided else "note"
    count = getattr(queue.counters, name)

    def count_later(number):
        monkeypatch.setattr(queue.counters, name, count)
        until(lambda: queue.step == size + 1)
        raise KeyboardInterrupt

    if rank == slow:
        monkeypatch.setattr(queue.counters, name, count_later)
        with pytest.raises(KeyboardInterrupt):
            submit(queue, 1)
    elif rank == host:
        for step in range(size):
            assert applied(queue, step) == 1
            assert submit(queue, 1).global_step == step + 1
    meet()
    if rank == host:
        # The place that the gradient of step 0 had.
        assert applied(queue, size) == 1
    tally = queue.tally()

    assert (tally.accepted[slow], tally.given_up[slow]) == (1, 0)


def test_nothing_is_lost_when_all_ranks_submit_at_will(make, comm, host, rank, size):
    queue, calls = make(), 30
    done = Parameters(Group.of(comm), host, 1, np.float64, "test")
    found = []

    def serve():
        for step in range(calls * size):
            found.append(applied(queue, step))
            done.publish(lambda flat: None, step + 1)

    if rank == host:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
    receipts = []
    for call in range(calls):
        receipts.append(submit(queue, 1000 * rank + call))
        step = receipts[-1].global_step + 1
        done.wait(step, Deadline(WAIT, "test"), str)
    everybody = meet(receipts)
    if rank == host:
        thread.join(WAIT)
        for r, theirs in enumerate(everybody):
            for call, receipt in enumerate(theirs):
                assert found[receipt.global_step] == 1000 * r + call
    done.free()

    assert queue.step == calls * size


@pytest.mark.ranks(min=2)
def test_a_host_that_only_serves_is_not_missing(comm, rank, size):
    queue = BoundedStalenessInbox(Group.of(comm), 0, 3, np.float64, workers=size - 1)
    if rank == 0:
        error = raised(applied, queue, 0, timeout=0)
        who = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
        assert str(error).endswith(f"which may come from {who}")
    meet()
    queue.free()


def test_next_ends_when_all_have_left_and_not_before(make, host, rank, size):
    queue = make()
    turns([size - 1], lambda _: submit(queue, 3))
    early = raised(applied, queue, 1, timeout=0) if rank == host else None
    meet()
    queue.leave()
    queue.leave()
    meet()
    if rank == host:
        assert type(early) is WaitTimeoutError
        assert applied(queue, 0) == 3
        assert type(raised(applied, queue, 1, timeout=WAIT)) is EverybodyLeftError
    assert queue.left() == list(range(size))
    meet()


@pytest.mark.ranks(min=2)
def test_leaving_twice_counts_once(make, host, rank, size):
    queue = make()
    if rank == size - 1:
        queue.leave()
        queue.leave()
    meet()
    if rank == host:
        assert type(raised(applied, queue, 0, timeout=0)) is WaitTimeoutError
    assert queue.left() == [size - 1]
    meet()


def test_a_rank_that_has_left_submits_no_more(make, rank):
    queue = make()
    queue.leave()

    with pytest.raises(InvalidArgumentError, match=f"rank {rank} has left"):
        submit(queue, 1)
    assert queue.step == 0
    meet()


@pytest.mark.ranks(min=2)
def test_a_rank_that_does_not_submit_need_not_leave(make, host, rank, size):
    queue = make(workers=size - 1)
    if rank != host:
        queue.leave()
    meet()
    if rank == host:
        assert type(raised(applied, queue, 0)) is EverybodyLeftError
    meet()


def test_timeout_names_the_ranks_that_may_submit(make, host, rank, size):
    queue = make()
    if rank == host:
        error = raised(applied, queue, 0, timeout=0)
        ranks = "rank 0" if size == 1 else f"ranks 0-{size - 1}"
        assert type(error) is WaitTimeoutError
        assert f"update 1, which may come from {ranks}" in str(error)
    meet()

"""Exceptions in the midst of a call: nothing hangs, and all gradients are counted.

One rank is interrupted by a signal handler at each point of a call, or cannot write a
gradient. Then the gradient is there or it is not, and the counts agree. Gradients are
small integers, so sums are exact.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.accumulator.protocol import CLOSED
from hpcaccum.server.bounded_staleness import BoundedStalenessInbox

from .acting import (  # noqa: F401
    Background,
    Take,
    acc_fixture,
    at,
    everywhere,
    make_fixture,
    meet,
    same_bits,
    until,
)
from .interrupting import at_each_point, interrupt, points
from .serving import next_total
from .support import WAIT

ANY_STEP = 2**40


def stride(acc):
    """Return the distance of the points tried: a trial over a network is slow."""
    return 3 if acc._protocol.words.direct else 23


def tallied(acc):
    """Return the numbers of accepted, dropped and given up gradients of this rank."""
    tally, rank = acc.statistics().tally, acc._shared.group.rank
    assert sum(tally.lags.values()) == sum(tally.accepted) + sum(tally.dropped)
    return tally.accepted[rank], tally.dropped[rank], tally.given_up[rank]


def check_sum(acc, there, total):
    """Take all gradients and one more; check everything that can be observed."""
    assert acc.num_accumulated() == there
    assert acc.apply_grad([1000, 1], ANY_STEP)
    step = acc.global_step
    found = acc.take_grad(there + 1, timeout=WAIT)
    same_bits(found, np.array([total + 1000, there + 1.0]) / (there + 1))
    assert (acc.num_accumulated(), acc.global_step) == (0, step + 1)
    assert not acc._protocol.words.read(CLOSED)
    assert not acc._protocol.state().waiting


def use_from_all_ranks(acc, size):
    """Apply and take on each rank, which remembers an earlier state."""
    for taker in range(size):
        step = at(0, lambda: acc.global_step)
        for rank in range(size):
            assert at(rank, acc.apply_grad, [rank, 1], step)
        mean = at(taker, acc.take_grad, size, timeout=WAIT)
        same_bits(mean, [(size - 1) / 2, 1.0])


def apply_in_slot(acc):
    slot = acc.slot(timeout=WAIT)
    slot[:] = [7, 1]
    acc.apply_grad(slot, ANY_STEP)


APPLIES = {
    "array": lambda acc: acc.apply_grad([7, 1], ANY_STEP),
    "slot": apply_in_slot,
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", APPLIES)
def test_interrupted_apply_adds_the_gradient_or_nothing(acc, size, kind, before):
    def trial(number):
        for _ in range(before):
            acc.apply_grad([3, 1], ANY_STEP)
        accepted, dropped, given_up = tallied(acc)
        more = interrupt(lambda: APPLIES[kind](acc), number)
        added = acc.num_accumulated() - before
        now = tallied(acc)
        assert now[:2] == (accepted + added, dropped)
        assert now[2] - given_up in ((0,) if added else (0, 1))
        check_sum(acc, before + added, 3 * before + 7 * added)
        return more, added

    assert at(-1, at_each_point, trial, stride(acc)) == {0, 1}
    use_from_all_ranks(acc, size)


def test_interrupted_apply_of_a_stale_gradient_adds_nothing(acc, size):
    def trial(number):
        accepted, dropped, given_up = tallied(acc)
        more = interrupt(lambda: acc.apply_grad([7, 1], -1), number)
        now = tallied(acc)
        assert now[::2] == (accepted, given_up)
        assert now[1] - dropped in ((0, 1) if more else (1,))
        return more, now[1] - dropped

    assert at(-1, at_each_point, trial, stride(acc)) == {0, 1}
    at(-1, check_sum, acc, 0, 0)
    use_from_all_ranks(acc, size)


CALLS = {
    "slot": lambda acc: acc.slot(timeout=WAIT),
    "apply_grad": lambda acc: acc.apply_grad([3, 1], ANY_STEP),
    "leave": lambda acc: acc._shared.writer.leave(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_signal_handler_cannot_make_a_call_during_another_one(acc, size, call):
    found = []

    def act():
        if acc._shared.writer._turn._busy:
            with pytest.raises(hpc.InvalidArgumentError, match="in a signal handler"):
                CALLS[call](acc)
            found.append(call)

    def trial(number):
        there = acc.num_accumulated()
        more = interrupt(lambda: acc.apply_grad([7, 1], ANY_STEP), number, act)
        return more, acc.num_accumulated() - there

    assert at(-1, at_each_point, trial, stride(acc)) == {1}
    assert at(-1, lambda: found)


def test_a_signal_handler_cannot_take_during_a_take(acc, size):
    found = []

    def act():
        if acc._protocol.take_lock._inside._first:
            with pytest.raises(hpc.InvalidArgumentError, match="in a signal handler"):
                acc.take_grad(1)
            found.append("take")

    def trial(number):
        acc.apply_grad([7, 1], ANY_STEP)
        more = interrupt(lambda: acc.take_grad(1, timeout=WAIT), number, act)
        return more, acc.num_accumulated()

    assert at(0, at_each_point, trial, stride(acc)) == {0}
    assert at(0, lambda: found)


class NoMemory(MemoryError):
    """Raised by a write."""


def fail(*args, **kwargs):
    raise NoMemory


def failing(acc, step=ANY_STEP):
    """Apply a gradient that cannot be written."""
    write, acc._storage.write = acc._storage.write, fail
    try:
        with pytest.raises(NoMemory):
            acc.apply_grad([7, 1], step)
    finally:
        acc._storage.write = write


@pytest.mark.parametrize("before", [0, 2])
def test_gradient_that_cannot_be_written_is_taken_back(acc, size, before):
    for _ in range(before):
        at(1, acc.apply_grad, [3, 1], ANY_STEP)
    accepted, dropped, given_up = at(1, tallied, acc)
    for _ in range(3):
        at(1, failing, acc)

    assert at(1, tallied, acc) == (accepted, dropped, given_up + 3)
    at(0, check_sum, acc, before, 3 * before)
    use_from_all_ranks(acc, size)


@pytest.mark.parametrize("before", [0, 1])
def test_interrupted_while_a_gradient_is_taken_back(acc, size, before):
    def trial(number):
        for _ in range(before):
            acc.apply_grad([3, 1], ANY_STEP)
        more = interrupt(lambda: failing(acc), number)
        check_sum(acc, before, 3 * before)
        return more, None

    at(-1, at_each_point, trial, stride(acc))
    use_from_all_ranks(acc, size)


def test_take_goes_on_waiting_for_a_gradient_that_is_given_up(acc, size):
    at(1, acc.apply_grad, [3, 1], ANY_STEP)
    take = Take(acc, 0, 3)
    at(1, failing, acc)
    at(1, acc.apply_grad, [3, 1], ANY_STEP)
    assert not take.over()
    assert at(0, acc.num_accumulated) == 2

    at(1, acc.apply_grad, [6, 1], ANY_STEP)
    same_bits(take.result(), [4.0, 1.0])
    use_from_all_ranks(acc, size)


def test_gradient_that_closed_the_round_and_is_given_up_is_left_out(acc, size):
    # The round is closed when the write fails, so it is too late to take it back.
    at(1, acc.apply_grad, [3, 1], 0)
    take = Take(acc, 0, 2)
    at(-1, failing, acc, 0)

    same_bits(take.result(), [3.0, 1.0])
    assert at(0, lambda: acc.global_step) == 1
    use_from_all_ranks(acc, size)


def test_round_of_which_all_is_given_up_is_not_taken(acc, size):
    take = Take(acc, 0, 1)
    at(-1, failing, acc, 0)
    at(0, until, lambda: acc._protocol.state().waiting)
    assert not take.over()
    assert at(1, acc.num_accumulated) == 0
    # A rank that waits for the next step would never return.
    assert at(1, lambda: acc.global_step) == 0

    assert at(-1, acc.apply_grad, [5, 1], 0)
    same_bits(take.result(), [5.0, 1.0])
    assert at(0, lambda: acc.global_step) == 1
    use_from_all_ranks(acc, size)


def test_closed_round_of_which_all_is_given_up_is_not_resumed(acc, size, monkeypatch):
    writing, release = threading.Event(), threading.Event()

    def fail_late(*args):
        writing.set()
        assert release.wait(WAIT)
        raise NoMemory

    monkeypatch.setattr(acc._storage, "write", fail_late)
    late = Background(1, lambda: acc.apply_grad([7, 1], ANY_STEP))
    assert at(1, writing.wait, WAIT)
    with pytest.raises(hpc.WaitTimeoutError, match="to finish writing"):
        at(0, acc.take_grad, 1, timeout=0)
    assert at(0, acc.num_accumulated) == 1
    release.set()
    with pytest.raises(NoMemory):
        late.result()
    monkeypatch.undo()

    assert at(0, acc.num_accumulated) == 0
    assert at(0, acc.apply_grad, [5, 1], ANY_STEP)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [5.0, 1.0])
    assert at(1, lambda: acc.global_step) == 1
    use_from_all_ranks(acc, size)


def test_shape_of_a_gradient_that_is_given_up_does_not_fix_the_round(make, size):
    acc = make(shape=None, capacity=4)
    at(1, failing, acc)
    assert at(0, acc.apply_grad, [1, 2, 3], 0)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), [1.0, 2.0, 3.0])

    take = Take(acc, 0, 2)
    at(1, failing, acc)
    at(0, until, lambda: not acc._protocol.state().shape)
    assert at(1, acc.apply_grad, [1, 2, 3, 4], 1)
    with pytest.raises(hpc.InvalidArgumentError, match="like the others of this round"):
        at(0, acc.apply_grad, [1, 2, 3], 1)
    at(0, acc.apply_grad, [1, 2, 3, 4], 1)
    same_bits(take.result(), [1.0, 2.0, 3.0, 4.0])


def test_interrupted_take_takes_all_or_nothing(acc, size):
    def trial(number):
        step = acc.global_step
        acc.apply_grad([3, 1], step)
        acc.apply_grad([4, 1], step)
        more = interrupt(lambda: acc.take_grad(2, timeout=WAIT), number)
        there = acc.num_accumulated()
        assert there in ((0, 2) if more else (0,))
        if acc._protocol.words.read(CLOSED) or not there:
            assert acc.global_step == step + 1
        else:
            assert acc.global_step == step
        if there:
            same_bits(acc.take_grad(2, timeout=WAIT), [3.5, 1.0])
        assert acc.global_step == step + 1
        check_sum(acc, 0, 0)
        return more, there

    assert at(-1, at_each_point, trial, stride(acc)) == {0, 2}
    use_from_all_ranks(acc, size)


def test_interrupted_take_that_waits_stands_for_nothing(acc, size):
    def trial(number):
        acc.apply_grad([3, 1], ANY_STEP)
        more = interrupt(lambda: acc.take_grad(3, timeout=0), number)
        check_sum(acc, 1, 3)
        return more, None

    at(-1, at_each_point, trial, stride(acc))
    use_from_all_ranks(acc, size)


def test_interrupted_apply_that_closes_a_round(make, size):
    # A take of another rank waits for the gradient, and gets it or the next one.
    acc = make(storage="slots")
    seen = set()
    for number in points(stride(acc)):
        step = at(0, lambda: acc.global_step)
        take = Take(acc, 0, 1)
        more = at(-1, interrupt, lambda step=step: acc.apply_grad([7, 1], step), number)
        at(-1, acc.apply_grad, [5, 1], ANY_STEP)
        first = take.result()
        if first[0] == 7:
            same_bits(at(1, acc.take_grad, 1, timeout=WAIT), [5.0, 1.0])
        else:
            same_bits(first, [5.0, 1.0])
        seen.add(first[0])
        assert at(1, acc.num_accumulated) == 0
        if not more:
            break
    assert seen >= {7.0}
    use_from_all_ranks(acc, size)


def test_interrupted_call_for_a_slot_or_a_number_changes_nothing(acc, size):
    calls = [
        lambda: acc.slot(timeout=WAIT),
        acc.num_accumulated,
        acc.statistics,
        lambda: acc.set_global_step(acc.global_step),
    ]
    for call in calls:

        def trial(number, call=call):
            return interrupt(call, number), None

        at(-1, at_each_point, trial, stride(acc))
        at(-1, check_sum, acc, 0, 0)
    use_from_all_ranks(acc, size)


def test_interrupted_leave_counts_once(acc, size):
    members = acc._protocol.membership
    words, rank = acc._protocol.words, acc._shared.group.rank

    def come_back():
        words.write(members._base, 0)
        words.write(members._base + 1 + rank, 0)
        members._increment.reset()
        members.has_left = False

    def trial(number):
        more = interrupt(acc.leave, number)
        left = members.num_left()
        assert members.left() == [rank] * left
        acc.leave()
        assert (members.left(), members.num_left()) == ([rank], 1)
        come_back()
        return more, left

    assert at(-1, at_each_point, trial, stride(acc)) == {0, 1}
    use_from_all_ranks(acc, size)


def test_interrupted_number_of_a_shape_is_a_number_less(make, size):
    acc = make(shape=None, capacity=2000)
    table = acc._protocol.shapes._table

    def trial(number):
        shape = (number, 1)
        # Without reading all entries: those that this test loses make that slow.
        more = interrupt(lambda: table._add(shape), number)
        assert table.shape(table.number(shape)) == shape
        acc.apply_grad(np.ones(shape), ANY_STEP)
        same_bits(acc.take_grad(1, timeout=WAIT), np.ones(shape))
        return more, None

    at(-1, at_each_point, trial, stride(acc))
    for rank in range(size):
        for shape in [(3, 1), (rank + 1, 2)]:
            assert at(rank, acc.apply_grad, np.ones(shape), ANY_STEP)
            same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.ones(shape))


@pytest.fixture(params=[10**6, math.inf], ids=["bounded", "unbounded"])
def queue(comm, request):
    options = {"max_lag": request.param}
    made = BoundedStalenessInbox(Group.of(comm), 0, 3, np.float64, **options)
    yield made
    meet()
    made.free()


def applied(queue, step):
    return next_total(queue, step, 3).tolist()


def test_interrupted_submit_is_an_update_or_an_empty_one(queue, size):
    number, more, seen = 0, True, set()

    def submit():
        queue.slot()[:] = 7
        queue.submit(0)

    while more:
        number += 1 if queue.words.direct else 5
        step, before = at(0, lambda: queue.step), at(0, queue.tally)
        more = at(-1, interrupt, submit, number)
        after, admitted = at(0, queue.tally), at(0, lambda: queue.step) - step
        accepted = sum(after.accepted) - sum(before.accepted)
        given_up = sum(after.given_up) - sum(before.given_up)
        assert accepted + given_up == admitted
        if admitted:
            assert at(0, applied, queue, step) == [7.0 * accepted] * 3
        seen.add((accepted, given_up))
    assert seen >= {(0, 0), (1, 0)}
    for rank in range(size):
        step = at(rank, lambda: (queue.slot(), queue.submit(0))[1].global_step)
        at(0, applied, queue, step)


def test_update_that_cannot_be_written_is_an_empty_one(queue, monkeypatch):
    def submit_in_vain():
        queue.slot()[:] = 7
        # The first word that is set fails.
        failures = iter([NoMemory])
        post = queue.words.store

        def fail_once(*args):
            for failure in failures:
                raise failure
            post(*args)

        with monkeypatch.context() as patch:
            patch.setattr(queue.words, "store", fail_once)
            with pytest.raises(NoMemory):
                queue.submit(0)

    # The root itself: an agent submits for other nodes.
    at(0, submit_in_vain)
    assert at(0, lambda: queue.step) == 1
    assert at(0, applied, queue, 0) == [0.0] * 3
    receipt = at(-1, lambda: (queue.slot().fill(2), queue.submit(0))[1])
    assert receipt.global_step == 1
    assert at(0, applied, queue, 1) == [2.0] * 3
    tally = at(0, queue.tally)
    assert (sum(tally.accepted), sum(tally.given_up)) == (1, 1)
    assert at(-1, queue._queue.was_put, 1)

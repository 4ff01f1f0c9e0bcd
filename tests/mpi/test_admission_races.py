"""Ranks of several nodes that submit at the same time, and the messages of calls."""

import functools
import time
from collections import Counter

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import ConditionalAccumulator
from tests import internals

from .acting import WAIT, Take, at, everywhere, meet, same_bits
from .on_nodes import SIZE, count_messages
from .training import started

pytestmark = pytest.mark.own_comm

GRADIENT = np.ones(2, np.float32)
LONGEST = 1 << 13  # bytes


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def acc(request, group, counts):
    options = {"shape": (2,), **getattr(request, "param", {})}
    made = ConditionalAccumulator("float32", comm=group, **options)
    kept = ConditionalAccumulator("float32", (2,), comm=group)
    # Counted is what the agent of `kept` sends, which is that of the group.
    count_messages(group, counts)
    yield made
    made.free()
    kept.free()


def costs(counts, rank, prepare, *args):
    """Have a rank act; return the result, and how many messages it sends.

    What is not counted prepares the call.
    """

    def counted():
        do = prepare(*args)
        counts.clear()
        return do(), counts["requests"]

    return at(rank, counted)


def far(group):
    """Return a rank on another node than rank 0."""
    return group.nodes[-1][-1]


def in_slot(acc, local_step):
    """Return the call that applies a gradient which is in its slot."""
    slot = acc.slot(timeout=WAIT)
    slot[:] = 1
    return functools.partial(acc.apply_grad, slot, local_step)


def copied(acc, local_step):
    return functools.partial(acc.apply_grad, GRADIENT, local_step)


def at_once(acc, gradient, local_step):
    return gradient(acc, local_step)()


# A long gradient is copied after its admission; the rank says when it is in place.
@pytest.mark.parametrize(
    ("acc", "apply", "short", "messages"),
    [
        ({}, in_slot, LONGEST, 1),
        ({}, in_slot, 0, 1),
        ({}, copied, LONGEST, 1),
        ({}, copied, 0, 2),
        ({"storage": "sum"}, copied, LONGEST, 2),
        ({"shape": None, "capacity": 2}, copied, LONGEST, 1),
    ],
    indirect=["acc"],
)
@pytest.mark.parametrize("waiting", [False, True])
def test_admission_is_one_message_in_any_order(
    acc, group, counts, size, waiting, apply, short, messages
):
    others = [rank for rank in range(size) if rank != far(group)]
    # The same limit for all: a rank stores what it has sent only after its answer.
    with internals.limits(short=short):
        # In each round another number of ranks comes first, which `far` does not know.
        for step, first in enumerate([0, len(others), 0, len(others) // 2]):
            take = Take(acc, 0, size) if waiting else None
            for rank in others[:first]:
                assert at(rank, at_once, acc, apply, step)
            receipt, cost = costs(counts, far(group), apply, acc, step)
            assert (receipt.accepted, receipt.global_step) == (True, step)
            assert cost == messages
            for rank in others[first:]:
                assert at(rank, at_once, acc, apply, step)
            taken = take.result() if take else at(0, acc.take_grad, size, timeout=WAIT)
            same_bits(taken, GRADIENT)
    assert acc.statistics().tally.accepted == (4,) * size


@pytest.mark.parametrize("apply", [in_slot, copied])
def test_a_second_gradient_of_a_round_is_added(acc, group, counts, apply):
    rank = far(group)
    assert at(rank, at_once, acc, apply, 0)
    receipt, cost = costs(counts, rank, apply, acc, 0)
    # The agent finds the first one; this rank adds to it.
    assert (receipt.accepted, cost) == (True, 2)
    assert at(0, acc.num_accumulated) == 2
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), GRADIENT)
    # The record that this rank remembers is not that of the round two steps later.
    assert at(0, at_once, acc, copied, 1)
    at(0, acc.take_grad, 1, timeout=WAIT)
    assert at(rank, at_once, acc, apply, 2)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), GRADIENT)


@pytest.fixture
def longest():
    """Vectors of up to so many bytes are sent with the request."""
    with internals.limits(short=LONGEST):
        yield


@pytest.mark.parametrize("length", [LONGEST // 4, LONGEST // 4 + 1])
def test_nobody_asks_for_a_short_gradient(group, counts, rank, size, length, longest):
    acc = ConditionalAccumulator("float32", (length,), comm=group)
    count_messages(group, counts)
    asks = 0 if length * 4 <= LONGEST else len(group.nodes) - 1
    # The leader of another node than the host's.
    base, leader = np.arange(length, dtype=np.float32), group.nodes[-1][0]

    def apply(step, times):
        for _ in range(times):
            slot = acc.slot(timeout=WAIT)
            slot[:] = base + (rank + step)
            assert acc.apply_grad(slot, step)

    def take():
        return functools.partial(acc.take_grad, size, timeout=WAIT)

    for step, (taker, times) in enumerate([(0, 1), (leader, 1), (0, 2), (0, 1)]):
        everywhere(apply, step, times)
        taken, messages = costs(counts, taker, take)
        expected = base + np.float32((size - 1) / 2 + step)
        np.testing.assert_allclose(taken, expected, rtol=1e-6)
        # Another node than the host's asks for the round, and says that it is reduced.
        assert messages == asks + (2 if taker else 0)
    acc.free()


@pytest.mark.parametrize("length", [LONGEST // 4, LONGEST // 4 + 1])
def test_a_stale_gradient_is_only_sent_if_it_is_short(group, counts, length, longest):
    acc = ConditionalAccumulator("float32", (length,), comm=group)
    count_messages(group, counts)
    at(0, acc.set_global_step, 3)
    with internals.before_records(acc, pytest.fail):
        for rank in (0, far(group)):
            receipt, cost = costs(counts, rank, in_slot, acc, 1)
            assert (receipt.accepted, receipt.lag, cost) == (False, 2, int(rank > 0))
    sent = at(far(group), lambda: counts["request_bytes"])
    assert (sent > LONGEST) == (length * 4 <= LONGEST)
    assert sent < 120 + LONGEST
    assert acc.statistics().tally.dropped[far(group)] == 1
    acc.free()


def drop_stale(group, counts, staleness, length):
    """Return an optimizer whose messages are counted, and its variable."""
    w = hpc.Variable(np.zeros(length, np.float32), "w")
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1), staleness, comm=group)
    opt.initialize([w])
    count_messages(group, counts)
    return opt, w


@pytest.mark.parametrize("length", [LONGEST // 4 - 32, LONGEST // 4])
def test_nobody_asks_for_a_short_update(group, counts, length, longest):
    opt, w = drop_stale(group, counts, 99, length)
    base = np.arange(length, dtype=np.float32)

    meet()
    counts.clear()
    meet()
    # A vector of gradients also has a number, which says that it has this one.
    assert at(far(group), internals.push, opt, {"w": base}, 0)
    at(0, internals.wait_for, opt, 1)
    # The answer, and a request for the vector.
    assert at(0, lambda: counts["requests"]) == 1 + (length * 4 >= LONGEST)
    np.testing.assert_array_equal(-opt.center(w), base)
    meet()
    opt.free()


@pytest.mark.parametrize("staleness", [3, None])
def test_submission_is_one_message_in_any_order(group, counts, size, staleness):
    # The step that `far` has is not that of the host; None: the bound is too small.
    limit = size - 2 if staleness is None else staleness
    opt, w = drop_stale(group, counts, limit, 2)
    push = functools.partial(internals.push, opt, {"w": GRADIENT}, 0)
    for rank in set(range(size)) - {far(group)}:
        assert at(rank, push)
    receipt, cost = costs(counts, far(group), lambda: push)
    accepted = staleness is not None
    assert (receipt.accepted, receipt.lag, cost) == (accepted, size - 1, 1)
    assert opt.global_step <= size - 1 + accepted
    meet()
    opt.free()
    assert (-w.value == size - 1 + accepted).all()


# What calls cost grows as docs/growth.md says


def sent(counts, act):
    """Return the requests and the vectors of all ranks between nodes in a call."""
    meet()
    counts.clear()
    meet()
    act()
    meet()
    found = meet(counts)
    return sum(each["requests"] for each in found), sum(n["vectors"] for n in found)


def test_a_take_is_a_sum_of_each_node(group, rank, counts):
    far, others = group.nodes[-1][-1], len(group.nodes) - 1
    with hpc.ConditionalAccumulator("float32", (SIZE,), comm=group) as acc:
        count_messages(group, counts)
        for step, taker in enumerate([0, far, far]):
            assert in_slot(acc, step)()

            def take(taker=taker):
                if rank == taker:
                    acc.take_grad(group.size, timeout=WAIT)

            # A rank of another node asks for the round, and says that it is reduced.
            asks = 0 if taker == 0 else 4
            assert sent(counts, take) == (others + asks, others)


def test_an_update_is_a_vector_of_each_node_to_the_host_and_back(group, rank, counts):
    w, others = hpc.Variable(np.zeros(SIZE, "f4"), "w"), len(group.nodes) - 1
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), group.size, comm=group) as opt:
        opt.initialize([w])
        count_messages(group, counts)
        # Each rank has its gradient admitted; these are answered.
        far = 2 * (group.size - len(group.nodes[0]))
        for _ in range(3):

            def step():
                opt.gradient_arrays()["w"][...] = 1
                opt.minimize(lambda: (0.0, opt.gradient_arrays()), var_list=[w])

            assert sent(counts, step) == (far + 2 * others, 2 * others)


def test_an_update_of_one_gradient_goes_to_one_node(group, rank, counts):
    w, far = hpc.Variable(np.zeros(SIZE, "f4"), "w"), group.nodes[-1][-1]
    with started(hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group), [w]) as opt:
        count_messages(group, counts)

        def push():
            if rank == far:
                opt.apply_gradients([(np.ones(SIZE, "f4"), w)])

        def pull():
            # No gradient is computed with older ones where there are newer ones.
            opt.compute_gradients(lambda: (0.0, [None]))

        for _ in range(3):
            # It is admitted, fetched, and its update is asked for.
            assert sent(counts, push) == (5, 2)
        # Each rank of another node asks for the newest step, unless one has just come.
        time.sleep(0.01)
        asks = 2 * (group.size - len(group.nodes[0]))
        assert sent(counts, pull) == (asks, 0)
        requests, vectors = sent(counts, lambda: opt.center(w))
        # One for each node that has not got that step yet.
        assert vectors == len(group.nodes) - 2
        assert requests == asks + 2 * vectors

"""Sums of gradients of several nodes: their bits, and agents that do nothing."""

import itertools

import numpy as np
import pytest

from hpcaccum import ConditionalAccumulator, WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import NodeParts, Place
from tests import internals

from .acting import VAIN, WAIT, Background, at, everywhere, meet, same_bits
from .on_nodes import named

# Elements of a vector, and of a piece of it in these tests.
COUNT, PIECE = 21, 5


@pytest.fixture(params=["one piece", "pieces"])
def pieces(request):
    """Send vectors in one piece or in several, the last of which has one element."""
    with internals.limits(piece=PIECE * 8 if request.param == "pieces" else COUNT * 8):
        yield


@pytest.fixture(autouse=True)
def limits():
    """Takes wait for other nodes no longer than for gradients; no agent has copies."""
    with internals.limits(sums=VAIN, short=0):
        yield


@pytest.fixture
def make(group, keep):

    def make(dtype="f8", count=COUNT):
        return keep(ConditionalAccumulator(dtype, (count,), comm=group))

    yield make
    meet()


def values(rank, count=COUNT, dtype="f8", seed=0):
    """Return the vector of a rank: numbers whose sum depends on the order."""
    random = np.random.default_rng([rank, seed])
    exponents = random.integers(-8, 8, count)
    return (random.standard_normal(count) * 10.0**exponents).astype(dtype)


def mean(group, ranks, count=COUNT, dtype="f8", seed=0):
    """Return the mean over ranks with NumPy only: each node first, then in order."""
    nodes = [
        [values(rank, count, dtype, seed) for rank in node if rank in ranks]
        for node in group.nodes
    ]
    sums = [sum(vectors[1:], vectors[0]) for vectors in nodes if vectors]
    return sum(sums[1:], sums[0]) / np.dtype(dtype).type(len(ranks))


def apply(acc, rank, step=0, in_slot=False, **options):
    """Apply the vector of a rank, from its slot or from other memory."""
    vector = values(rank, **options)
    if in_slot:
        slot = acc.slot(timeout=WAIT)
        slot[:] = vector
        vector = slot
    assert acc.apply_grad(vector, step)


def take(acc):
    return acc.take_grad(1, timeout=WAIT)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_any_rank_gets_the_mean_of_any_ranks(make, group, rank, size, dtype, pieces):
    acc = make(dtype)
    subsets = [
        ranks
        for number in range(1, size + 1)
        for ranks in itertools.combinations(range(size), number)
    ]
    for step, ranks in enumerate(subsets):
        if rank in ranks:
            apply(acc, rank, step, in_slot=step % 2 == 0, dtype=dtype, seed=step)
        meet()
        found = at(step, take, acc)
        same_bits(found, mean(group, ranks, dtype=dtype, seed=step))


def test_vectors_of_any_number_of_pieces(make, group, rank, size):
    with internals.limits(piece=PIECE * 8):
        for count in [0, 1, PIECE, PIECE + 1, 4 * PIECE, 5 * PIECE - 1, 9 * PIECE]:
            acc = make(count=count)
            everywhere(apply, acc, rank, count=count)
            same_bits(at(-1, take, acc), mean(group, range(size), count))
            meet()


def test_overflow_is_seen_in_the_result_only(make):
    acc = make()
    everywhere(acc.apply_grad, np.full(COUNT, np.finfo("f8").max))
    with np.errstate(all="raise"):
        assert (at(0, take, acc) == np.inf).all()


def test_all_ranks_take_at_a_time(make, group, rank, size):
    several = [make() for _ in range(size)]
    for step in range(6):
        everywhere(lambda s=step: [apply(acc, rank, s, seed=s) for acc in several])
        for found in everywhere(take, several[rank]):
            same_bits(found, mean(group, range(size), seed=step))


def test_sum_that_was_given_up_does_not_disturb_the_next(
    make, held, group, rank, size, pieces
):
    acc, other = make(), make()
    for each in (acc, other):
        everywhere(apply, each, rank)
    with held:
        with pytest.raises(WaitTimeoutError) as caught:
            at(0, acc.take_grad, 1, timeout=VAIN)
        # The node that is missing, not those whose sums have arrived.
        late = f" s for the sum of {named(group.nodes[-1][0])}"
        assert str(caught.value).endswith(late)
        # This one is asked for while the other one is under way.
        background = Background(0, lambda: take(other))
    same_bits(background.result(), mean(group, range(size)))
    # Another rank may resume it.
    same_bits(at(-1, take, acc), mean(group, range(size)))
    everywhere(apply, acc, rank, 1, seed=1)
    same_bits(at(0, take, acc), mean(group, range(size), seed=1))


@pytest.mark.ranks(min=3)
def test_sum_that_was_given_up_is_not_begun_after_another(group, size):
    node = max(range(len(group.nodes)), key=lambda each: len(group.nodes[each]))
    leader, *others = group.nodes[node]
    if not others:
        pytest.skip("no two ranks share a node")
    parts, found = NodeParts(group, 2 * COUNT * 8, "parts"), []
    parts.own.view("f8")[: 2 * COUNT] = np.repeat([1, 2], COUNT)
    meet()

    def add(index, timeout):
        places = [Place(each, index * COUNT * 8) for each in range(size)]
        limit = Deadline(timeout, "sum")
        found.append(parts.sum(places, COUNT, np.dtype("f8"), 1, limit))

    with internals.hold_agent(group, node) as go_on:
        with pytest.raises(WaitTimeoutError):
            at(others[0], add, 0, VAIN)
        # The agent gets requests of its own rank first.
        background = Background(leader, lambda: add(1, WAIT))
        meet()
        go_on()
        background.result()
    # When the agent has nothing left to do. Views stay valid.
    parts.free()
    for each in found:
        assert (each == 2 * size).all()


def test_the_agent_of_the_own_node_is_named_if_it_does_nothing(make, held, group, rank):
    acc, last = make(), group.nodes[-1]
    at(0, apply, acc, 0)
    with held, pytest.raises(WaitTimeoutError) as caught:
        at(last[-1], acc.take_grad, 1, timeout=VAIN)
    assert str(caught.value).endswith(f" s for the sum of {named(last[0])}")
    same_bits(at(-1, take, acc), mean(group, [0]))

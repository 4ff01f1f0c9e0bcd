"""Takes of ranks of other nodes, which the agent of the host's node makes for them."""

import numpy as np
import pytest

from hpcaccum import (
    ConditionalAccumulator,
    EverybodyLeftError,
    WaitTimeoutError,
    testing,
)

from .acting import (
    VAIN,
    WAIT,
    Admitted,
    Take,
    at,
    everywhere,
    interrupted,
    meet,
    same_bits,
)
from .on_nodes import named

pytestmark = pytest.mark.ranks(min=2)


@pytest.fixture
def taker(group):
    """Return a rank on another node than the host."""
    return group.nodes[0][-1]


@pytest.fixture
def host(group):
    return group.nodes[-1][-1]


@pytest.fixture(params=["slots", "sum", "shapes"])
def acc(request, group, host):
    shapes = {"shape": None, "capacity": 2}
    options = {
        "slots": {"shape": (2,)},
        "sum": {"shape": (2,), "storage": "sum"},
        "shapes": shapes,
    }[request.param]
    with ConditionalAccumulator("f8", comm=group, host=host, **options) as made:
        yield made
        meet()


def apply(acc, value=1.0):
    return acc.apply_grad(np.full(2, value), 99)


def test_a_take_that_gives_up_names_the_silent_ranks(acc, taker, size):
    others = [rank for rank in range(size) if rank != taker]
    assert at(taker, apply, acc)
    for timeout in (0, VAIN):
        with pytest.raises(WaitTimeoutError) as caught:
            at(taker, acc.take_grad, size, timeout=timeout)
        text = str(caught.value)
        assert text.startswith(f"{acc.name}: take_grad({size}): waited ")
        assert f" s for {size} gradients at step 0, had 1 (nothing from rank" in text
    for rank in others:
        assert at(rank, apply, acc)
    # It looks once, also without time.
    same_bits(at(taker, acc.take_grad, size, timeout=0), np.ones(2))


def test_a_take_names_those_ahead_of_it(acc, taker, host):
    first = Take(acc, host, 1)
    with pytest.raises(WaitTimeoutError, match=f"rank {host}, ahead of this rank"):
        at(taker, acc.take_grad, 1, timeout=VAIN)
    assert at(taker, apply, acc)
    same_bits(first.result(), np.ones(2))


def test_a_closed_round_is_left_to_the_next_take(acc, taker, host):
    late = Admitted(acc, host)
    with pytest.raises(WaitTimeoutError, match=f"rank {host}, admitted to the rou"):
        at(taker, acc.take_grad, 1, timeout=VAIN)
    assert at(taker, apply, acc, 3.0)
    late.write([5, 5])
    same_bits(at(taker, acc.take_grad, 1, timeout=WAIT), np.full(2, 5.0))
    same_bits(at(host, acc.take_grad, 1, timeout=WAIT), np.full(2, 3.0))


@pytest.mark.parametrize("next_taker", ["same", "host"])
def test_an_interrupted_take_leaves_the_gradients(acc, taker, host, size, next_taker):
    assert at(taker, apply, acc)
    at(taker, interrupted, acc.take_grad, size, timeout=WAIT)
    for rank in range(size):
        assert rank == taker or at(rank, apply, acc)
    rank = taker if next_taker == "same" else host
    same_bits(at(rank, acc.take_grad, size, timeout=WAIT), np.ones(2))


def test_a_take_that_fails_to_sum_leaves_the_round(acc, taker, host, size):
    everywhere(apply, acc)
    with testing.fail("sum", acc, MemoryError), pytest.raises(MemoryError):
        at(taker, acc.take_grad, size, timeout=WAIT)
    assert everywhere(acc.num_accumulated) == [size] * size
    same_bits(at(host, acc.take_grad, 1, timeout=WAIT), np.ones(2))
    assert everywhere(acc.num_accumulated) == [0] * size


def test_a_take_ends_when_all_have_left(acc, taker):
    everywhere(acc.leave)
    for timeout in (0, WAIT):
        with pytest.raises(EverybodyLeftError, match="ranks have left"):
            at(taker, acc.take_grad, 1, timeout=timeout)


def test_an_agent_that_does_not_answer_is_named(acc, held, group, taker, size):
    everywhere(apply, acc)
    with held, testing.limits(grace=VAIN):
        with pytest.raises(WaitTimeoutError) as caught:
            at(taker, acc.take_grad, size, timeout=VAIN)
        agent = named(group.nodes[-1][0])
        assert str(caught.value).endswith(f"s for the answer of the agent of {agent}")
        # The end of the first one comes first.
        with pytest.raises(WaitTimeoutError, match="the answer of the agent"):
            at(taker, acc.take_grad, size, timeout=VAIN)
    same_bits(at(taker, acc.take_grad, size, timeout=WAIT), np.ones(2))


def test_takes_of_all_ranks_are_served(acc, size):
    takes = [Take(acc, rank, 1) for rank in range(size)]
    for value in range(size):
        assert at(0, apply, acc, float(value))
        same_bits(takes[value].result(), np.full(2, float(value)))

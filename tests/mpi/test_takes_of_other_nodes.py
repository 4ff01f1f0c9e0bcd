"""Takes of ranks of other nodes, which the agent of the host's node makes for them."""

import numpy as np
import pytest

from hpcaccum import (
    ConditionalAccumulator,
    WaitTimeoutError,
    testing,
)

from .acting import (
    VAIN,
    WAIT,
    Take,
    at,
    everywhere,
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

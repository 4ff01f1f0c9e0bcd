"""What calls cost between nodes grows as docs/growth.md says; counted, not timed."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

import hpcaccum as hpc

from .growth import SIZE, count_messages
from .on_nodes import group_on_nodes  # noqa: F401
from .support import WAIT, meet

pytestmark = pytest.mark.own_comm


@pytest.fixture
def counts():
    return Counter()


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
            apply = acc.slot(timeout=WAIT)
            apply[:] = rank
            assert acc.apply_grad(apply, step)

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
    with hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group) as opt:
        opt.initialize([w])
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

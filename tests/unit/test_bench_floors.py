"""The floors of the links, each reached by a way to send the bytes that is written out.

A program here is a list of messages: from node, to node, bytes in units of a gradient.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hpcaccum.bench.measure import sum_everywhere, update_each

SHAPES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 2), (5, 8)]


def busiest(messages):
    """Return the most bytes out of a node, or into one."""
    out, into = Counter(), Counter()
    for source, target, size in messages:
        if source != target:
            out[source] += size
            into[target] += size
    return max([*out.values(), *into.values()], default=0)


def pairs(nodes):
    return [(a, b) for a in range(nodes) for b in range(nodes)]


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_sum_everywhere(nodes, ranks):
    stripes = [(a, b, 1 / nodes) for a, b in pairs(nodes)]  # of sums of the nodes
    sums = [(b, a, 1 / nodes) for a, b in pairs(nodes)]

    assert busiest(stripes + sums) == pytest.approx(sum_everywhere(nodes))


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_update_each(nodes, ranks):
    stripes = [(a, b, 1 / nodes) for a, b in pairs(nodes) for _ in range(ranks)]
    parameters = [(b, a, 1 / nodes) for a, b in pairs(nodes)]
    floor = update_each(nodes, nodes * ranks)

    assert busiest(stripes + parameters) == pytest.approx(floor)


def test_four_nodes_of_two_ranks():
    assert sum_everywhere(4) == 1.5
    assert update_each(4, 8) == 2.25

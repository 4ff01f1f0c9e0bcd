"""Groups whose ranks are on several nodes, real ones or made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from mpi4py import MPI

from hpcaccum import Group

from .reducing import NODES, made_up


@pytest.fixture(name="group", params=["real", *NODES])
def group_on_nodes(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator:
    """Yield a group on several nodes; at the end, no thread of it may be left."""
    real, before = Group.of(comm), threading.active_count()
    if comm.size == 1:
        pytest.skip("needs 2 ranks, for two nodes")
    if (request.param == "real") == real.single_node:
        pytest.skip("the ranks are on one node" if real.single_node else "made up")
    if request.param == "real":
        yield real
    else:
        made = made_up(comm, NODES[request.param])
        yield made
        made.free()
    assert threading.active_count() == before


def leads(group: Group) -> bool:
    """Whether this rank is the first of its node."""
    return group.nodes[group.node_number][0] == group.rank

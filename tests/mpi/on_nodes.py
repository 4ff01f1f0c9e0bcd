"""Groups whose ranks are on several nodes, real ones or made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from mpi4py import MPI

from hpcaccum import Group
from hpcaccum.nodes import Agent

from .reducing import NODES, made_up
from .support import WAIT, meet


@pytest.fixture(name="group", params=["real", *NODES])
def group_on_nodes(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator:
    """Yield a group on several nodes; at the end, no thread of it may be left."""
    real, before = Group.of(comm), threading.enumerate()
    if comm.size == 1:
        pytest.skip("needs 2 ranks, for two nodes")
    if (request.param == "real") == real.single_node:
        pytest.skip("the ranks are on one node" if real.single_node else "made up")
    if twin := _twin(request.param, comm.size):
        pytest.skip(f"{twin!r} are the same nodes")
    yield real if request.param == "real" else made_up(comm, request.param)
    # One that an earlier test has left may have ended meanwhile.
    assert {*threading.enumerate()} <= {*before}


def _twin(nodes: str, size: int) -> str | None:
    """Return earlier nodes that are the same with so few ranks."""
    if nodes == "real":
        return None
    layouts = {
        name: [node(rank, size) for rank in range(size)] for name, node in NODES.items()
    }
    first = next(name for name in NODES if layouts[name] == layouts[nodes])
    return None if first == nodes else first


def leads(group: Group) -> bool:
    """Whether this rank is the first of its node."""
    return group.node_ranks[0] == group.rank


def named(leader: int) -> str:
    """Return how messages name a node whose leader is that rank; all have one name."""
    return f"node {MPI.Get_processor_name()} (leader rank {leader})"


class Held:
    """A service whose requests hold up the agent until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def handle(self, source: int) -> Iterator[bool]:
        self.begun.set()
        self.released.wait(WAIT)
        yield True


@pytest.fixture(name="held")
def held_agent(group: Group) -> Iterator:
    """Yield a context in which the agent of the last node does nothing."""
    agent, service = Agent.of(group), Held()
    number = agent.add(service)
    last = len(group.nodes) - 1

    class Context:
        def __enter__(self):
            meet()
            if group.rank == agent.leaders[last]:
                agent.request(last, number)
                service.begun.wait(WAIT)
            meet()

        def __exit__(self, *error):
            meet()
            service.released.set()

    yield Context()
    service.released.set()
    meet()
    agent.remove(number, "held")

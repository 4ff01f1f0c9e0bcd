"""Groups whose ranks are on several nodes, real ones or made up."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from mpi4py import MPI

from hpcaccum import Group, group_of
from tests import internals

from .reducing import NODES, made_up
from .support import meet


@pytest.fixture(name="group", params=["real", *NODES])
def group_on_nodes(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator:
    """Yield a group on several nodes; at the end, no thread of it may be left."""
    real = request.param == "real"
    group = group_of(comm) if real else made_up(comm, request.param)
    before = threading.enumerate()
    yield group
    # One that an earlier test has left may have ended meanwhile.
    assert {*threading.enumerate()} <= {*before}


def skip_reason(
    nodes: object, size: int, single_node: bool, chosen: list[str]
) -> str | None:
    """Say why a test cannot run with ``nodes``; None if it can.

    It is known without a fixture, so that the ranks need not exchange it.

    Args:
        nodes: The parameter of `group_on_nodes`.
        size: Number of ranks.
        single_node: Whether they really are on one node.
        chosen: The made-up nodes to test, of those that are not the same; all if empty.
    """
    if size == 1:
        return "needs 2 ranks, for two nodes"
    if (nodes == "real") == single_node:
        return "the ranks are on one node" if single_node else "made up"
    if twin := _twin(nodes, size):
        return f"{twin!r} are the same nodes"
    if nodes != "real" and chosen and nodes not in chosen:
        return f"tested are {' and '.join(chosen)} (mpi_nodes)"
    return None


def _twin(nodes: object, size: int) -> str | None:
    """Return earlier nodes that are the same with so few ranks."""
    if nodes == "real":
        return None
    layouts = {
        name: [node(rank, size) for rank in range(size)] for name, node in NODES.items()
    }
    first = next(name for name in NODES if layouts[name] == layouts[nodes])
    return None if first == nodes else first


@pytest.fixture(name="one_node")
def group_on_one_node(comm: MPI.Intracomm) -> Group:
    """Return the group of ranks that share memory."""
    group = group_of(comm)
    if not group.single_node:
        pytest.skip("the ranks do not share memory")
    return group


def leaders(group: Group) -> list[int]:
    """Return the first rank of each node."""
    return [ranks[0] for ranks in group.nodes]


def workers(group: Group, servers: list[int]) -> list[int]:
    """Return the ranks that train if others only serve; skip a test without any."""
    found = [rank for rank in range(group.size) if rank not in servers]
    if not found:
        pytest.skip("no rank is left to train")
    return found


def leads(group: Group) -> bool:
    """Whether this rank is the first of its node."""
    return group.node_ranks[0] == group.rank


def named(leader: int) -> str:
    """Return how messages name a node whose leader is that rank; all have one name."""
    return f"node {MPI.Get_processor_name()} (leader rank {leader})"


@pytest.fixture(name="held")
def held_agent(group: Group) -> Iterator:
    """Yield a context in which the agent of the last node does nothing."""
    with contextlib.ExitStack() as end:

        class Context:
            def __enter__(self):
                self.go = end.enter_context(internals.hold_agent(group, -1))

            def __exit__(self, *error):
                meet()
                self.go()

        yield Context()
        meet()


# Elements of a gradient of float32; so many that no rank sends it at once, and one
# piece.
SIZE = 1 << 13


class CountedComm:
    """The communicator of agents, whose messages to other nodes are counted."""

    def __init__(self, agent: Any, counts: Counter[str]) -> None:
        self._comm, self._counts = agent.comm, counts
        self._home = agent.leaders[agent.node]

    def __getattr__(self, name: str) -> Any:
        """Return what is not counted."""
        return getattr(self._comm, name)

    def issend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.issend(message, rank, tag)

    def isend(self, message: Any, rank: int, tag: int) -> Any:
        self._count(message, rank)
        return self._comm.isend(message, rank, tag)

    def _count(self, message: Any, rank: int) -> None:
        if rank != self._home:
            size = len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            self._counts.update(requests=1, request_bytes=size)

    def Isend(self, data: Any, rank: int, tag: int) -> Any:
        self._counts.update(vectors=int(data.nbytes >= SIZE * 4))
        return self._comm.Isend(data, rank, tag)


def count_messages(group: Group, counts: Counter[str]) -> None:
    """Count the messages that this rank and its agent send to other nodes."""
    agent = internals.agent_of(group)
    agent.comm = CountedComm(agent, counts)

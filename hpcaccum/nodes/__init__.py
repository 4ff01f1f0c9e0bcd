"""What moves between nodes: one agent per node, and sums of gradients.

A group that spans several nodes has an `Agent` on each node. `NodeParts` is memory of
each rank on its own node, of which agents send sums to any rank. `Calls` are of a
function, which the agent of another node calls. A `Change` is what a rank waits for
that an agent of its node does. A group on one node has no agents.

Imports `mpi`, `summation`, `deadline`, `wake` and `errors` only.
"""

from __future__ import annotations

from hpcaccum.nodes.agent import Agent, Service, Steps
from hpcaccum.nodes.calls import Calls
from hpcaccum.nodes.change import Change
from hpcaccum.nodes.parts import NodeParts, Place
from hpcaccum.nodes.transfer import (
    Incoming,
    is_short,
    one_range,
    pieces_of,
    send_pieces,
)

__all__ = [
    "Agent",
    "Calls",
    "Change",
    "Incoming",
    "NodeParts",
    "Place",
    "Service",
    "Steps",
    "is_short",
    "one_range",
    "pieces_of",
    "send_pieces",
]

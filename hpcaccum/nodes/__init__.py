"""Exchange between nodes: one agent per node, and sums of gradients.

A group that spans several nodes has an `Agent` on each node. `NodeParts` is memory of
each rank on its own node, of which agents send sums to any rank. `Calls` has the agent
of another node call a function; so the words of `words_of` are on one node and all
ranks use them. A group on one node has no agents.

`transfer` sends long vectors in pieces. Imports `mpi` and the modules below it.
"""

from __future__ import annotations

from hpcaccum.nodes.agent import Agent, Service, StepQueue, Steps
from hpcaccum.nodes.calls import Call, Calls
from hpcaccum.nodes.parts import LostNodeError, NodeParts, Place
from hpcaccum.nodes.transfer import (
    Incoming,
    Narrowing,
    is_short,
    pieces_in,
    send_pieces,
)
from hpcaccum.nodes.words import words_of

__all__ = [
    "Agent",
    "Call",
    "Calls",
    "Incoming",
    "LostNodeError",
    "Narrowing",
    "NodeParts",
    "Place",
    "Service",
    "StepQueue",
    "Steps",
    "is_short",
    "pieces_in",
    "send_pieces",
    "words_of",
]

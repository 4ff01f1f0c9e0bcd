"""The parameter server: takes gradients, updates the center, publishes parameters.

A `ParameterServer` is one object on every rank: a client, and on servers a loop. The
root is the rank that decides what makes each update; users call it the host.

gradients: A rank writes its gradient as one vector (`wire_format`) and submits it to an
    `Inbox` (`options`), of which there are two: `QuorumInbox` and
    `BoundedStalenessInbox`. Late gradients may have a factor (`lateness`).
updates: A server runs an `UpdateLoop`, which updates what the server has of the center:
    all of it, or a `part`. On one node, `node_update` divides an update among the ranks
    that wait.
parameters: The loop gives them to the `Publisher`: each node has a `double_buffer`,
    which its ranks read; between nodes, also an agent, which sends and receives. If
    variables are sparse, `parameter_copies` copies and sends only the rows that are in
    a `RowLog`.
several servers: The root runs an `OrderLoop`. Each server gets its gradients from
    `Orders`, which agents take to the nodes of the servers.

Imports `accumulator`, `nodes`, `rows`, `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.lateness import Factors, Lateness, factors_of
from hpcaccum.server.options import (
    LARGE,
    Inbox,
    MakeInbox,
    ServerOptions,
    Servers,
    ServerSetup,
    check_nodes,
    spread,
)
from hpcaccum.server.orders import AT_A_TIME
from hpcaccum.server.parameter_copies import SHARE
from hpcaccum.server.part import joined
from hpcaccum.server.quorum import QuorumInbox
from hpcaccum.server.server import ParameterServer, ServerState, check_first_step

__all__ = [
    "AT_A_TIME",
    "LARGE",
    "SHARE",
    "BoundedStalenessInbox",
    "Factors",
    "Inbox",
    "Lateness",
    "MakeInbox",
    "ParameterServer",
    "QuorumInbox",
    "ServerOptions",
    "ServerSetup",
    "ServerState",
    "Servers",
    "check_first_step",
    "check_nodes",
    "factors_of",
    "joined",
    "spread",
]

"""The parameter server: takes gradients, updates the center, publishes parameters.

A `ParameterServer` is one object on every rank: a client, with a role as a server. The
root is the rank that decides what makes each update; users call it the host.

gradients: A rank writes its gradient as one vector (`wire_format`) and submits it to an
    `Inbox`, of which there are two: `QuorumInbox`, and `BoundedStalenessInbox` with an
    `update_queue`.
updates: The `role` of a single server is an `update_loop`. On one node, `node_update`
    divides an update among the ranks that wait.
parameters: They travel through `Parameters`: a `double_buffer` on each node, which
    ranks read (`node_copy`), and `messages` between agents. If variables are sparse,
    `parameter_copies` copies only the rows that are in a `RowLog`, and a `row_draft`
    makes a message of them.
several servers: Each has a part of the center (`shard`). `ShardedParameters` are in the
    place of `Parameters`, with an `order_loop` on the root, a `shard_loop` on each
    server, and an `order_agent` on each node. `Questions` of the root to the servers
    are answered between two updates.

Imports `accumulator`, `nodes`, `rows`, `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.inbox import Inbox
from hpcaccum.server.parameters import Parameters
from hpcaccum.server.quorum import QuorumInbox
from hpcaccum.server.server import ParameterServer, ServerState, check_first_step
from hpcaccum.server.shard import joined
from hpcaccum.server.wire_format import gradients_by_name

__all__ = [
    "BoundedStalenessInbox",
    "Inbox",
    "ParameterServer",
    "Parameters",
    "QuorumInbox",
    "ServerState",
    "check_first_step",
    "gradients_by_name",
    "joined",
]

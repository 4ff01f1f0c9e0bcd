"""The parameter server: takes gradients, updates the center, publishes parameters.

`ParameterServer` is one object on every rank: a `client` with a `role`, which is the
`update_loop` on a single server. Gradients travel through an `Inbox`, of which there
are two: `QuorumInbox`, and `BoundedStalenessInbox` with an `update_queue`. Parameters
travel through `Parameters`. On one node, `node_update` divides an update among the
ranks that wait. Several servers between nodes have a part of the center each:
`ShardedParameters`, with an `order_loop` on the root, a `shard_loop` on each of them,
and an `order_agent` on each node.
`wire_format` maps both between names and flat vectors. If variables are sparse,
`parameter_copies` copies only the rows that are in the `row_log`. `messages` are what
agents send of published parameters; a `row_draft` makes one of such rows.

Imports `accumulator`, `nodes`, `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.inbox import Inbox
from hpcaccum.server.parameters import Parameters
from hpcaccum.server.quorum import QuorumInbox
from hpcaccum.server.server import ParameterServer, ServerState
from hpcaccum.server.shard import joined
from hpcaccum.server.wire_format import gradients_by_name

__all__ = [
    "BoundedStalenessInbox",
    "Inbox",
    "ParameterServer",
    "Parameters",
    "QuorumInbox",
    "ServerState",
    "gradients_by_name",
    "joined",
]

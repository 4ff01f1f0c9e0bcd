"""The parameter server: takes gradients, updates the center, publishes parameters.

`ParameterServer` is one object on every rank. Gradients travel through an `Inbox`, of
which there are two: `QuorumInbox` and `BoundedStalenessInbox`. Parameters travel
through a `DoubleBuffer`.

Imports `accumulator`, `mpi`, `device` and the modules below them.
"""

from __future__ import annotations

from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.inbox import Inbox, QuorumInbox
from hpcaccum.server.server import ParameterServer, gradients_by_name

__all__ = [
    "BoundedStalenessInbox",
    "DoubleBuffer",
    "Inbox",
    "ParameterServer",
    "QuorumInbox",
    "gradients_by_name",
]

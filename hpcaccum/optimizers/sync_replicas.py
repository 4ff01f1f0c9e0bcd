"""SyncReplicasOptimizer: one update from the mean of a quorum of fresh gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.arguments import positive_count
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import QuorumInbox

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.accumulator import Receipt
    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.server import Inbox, ParameterServer


class SyncReplicasOptimizer(OneSidedOptimizer):
    """Updates with the mean of ``replicas_to_aggregate`` gradients of one step.

    A gradient that was computed before the last update is dropped. With a quorum less
    than the number of workers the rest are backups: the first gradients win, nobody
    waits for a straggler. The decision is one for all variables.

    After an accepted gradient a worker waits for the update that it is part of. If the
    quorum is more than there are workers, each brings its share of gradients first.

    Args:
        opt: The optimizer that makes the updates, on the host.
        replicas_to_aggregate: Gradients of one update, at least.
        total_num_replicas: Number of workers; accepted for compatibility, the
            communicator knows it.
        use_locking: Ignored.
        name: For messages.
        comm, host, dedicated: See `OneSidedOptimizer`.

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016
        (arXiv:1604.00981); the behaviour of ``tf.compat.v1.train``'s optimizer of this
        name, except that no round is wasted after the start.
    """

    def __init__(
        self,
        opt: Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
    ) -> None:
        options = {
            "replicas_to_aggregate": lambda: positive_count(
                replicas_to_aggregate, "replicas_to_aggregate"
            ),
            "total_num_replicas": lambda: (
                None
                if total_num_replicas is None
                else positive_count(total_num_replicas, "total_num_replicas")
            ),
        }
        super().__init__(opt, name, options, comm=comm, host=host, dedicated=dedicated)
        self._quorum = int(replicas_to_aggregate)
        # How many gradients of one step each worker may bring.
        self._share = -(-self._quorum // self._workers)
        # The step of the last one accepted, and how many were of that step.
        self._round, self._brought = -1, 0

    def _make_inbox(self, size: int, dtype: np.dtype[Any]) -> Inbox:
        return QuorumInbox(
            self._group, self._host, size, dtype, self._quorum, self._workers
        )

    def _after(self, server: ParameterServer, receipt: Receipt) -> None:
        if receipt.global_step != self._round:
            self._round, self._brought = receipt.global_step, 0
        self._brought += bool(receipt)
        if receipt and self._brought < self._share and server.step == self._step:
            return
        super()._after(server, receipt)

"""SyncReplicasOptimizer: one update from the mean of a quorum of fresh gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import positive_count
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.optimizers.served import Served
from hpcaccum.optimizers.variable import Variable
from hpcaccum.server import Lateness, QuorumInbox, ServerOptions, Servers, factors_of

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class SyncReplicasOptimizer(OneSidedOptimizer):
    """Updates with the mean of ``replicas_to_aggregate`` gradients of one step.

    With weights, it is sum(weight * gradient) / sum(weight). A gradient computed before
    the last update is dropped. With ``lateness``, one that is late by a single update
    joins the next one instead: its weight is multiplied by ``lateness(1)``, and the
    receipt has this factor. If the quorum is smaller than the number of workers, the
    others are backups: the update uses the first gradients and does not wait for
    stragglers. A gradient is accepted or dropped for all variables together.

    After an accepted gradient a worker waits for the update that contains it. If the
    quorum is larger than the number of workers, each worker first contributes its share
    of gradients.

    Args:
        opt: Makes the updates, on the host rank.
        replicas_to_aggregate: Least number of gradients in an update; by default, one
            less than ranks train, or all of 1 or 2.
        total_num_replicas: Number of workers; accepted for compatibility, the
            communicator determines it.
        use_locking: Ignored.
        name: Name for messages.
        lateness: Factor of a gradient that is one step late: "inverse", which is 1 / 2,
            or a callable that takes a lag and returns a number from 0 to 1, the same
            on all ranks. It is called at once, with 0 and 1; only the factor of 1
            counts. By default such a gradient is dropped.
        comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype: See
            `OneSidedOptimizer`.

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016
        (arXiv:1604.00981); the behavior of ``tf.compat.v1.train``'s optimizer of this
        name, except that no round is wasted after the start.
    """

    _averages = True

    def __init__(
        self,
        opt: Optimizer,
        replicas_to_aggregate: int | None = None,
        total_num_replicas: int | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        lateness: Lateness = None,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
        servers: Servers = "auto",
        on_nonfinite: OnNonfinite = "accept",
        min_workers: int = 1,
        wire_dtype: Any = None,
    ) -> None:
        def check(workers: int) -> dict[str, Any]:
            quorum = replicas_to_aggregate
            if quorum is None:
                quorum = max(workers - 1, min(workers, 2))
            quorum = positive_count(quorum, "replicas_to_aggregate")
            if quorum > (most := QuorumInbox.most):
                raise InvalidArgumentError(
                    f"replicas_to_aggregate must be at most {most}, got {quorum}"
                )
            total = total_num_replicas
            if total is not None:
                total = positive_count(total, "total_num_replicas")
            return {
                "replicas_to_aggregate": quorum,
                "total_num_replicas": total,
                "lateness": factors_of(lateness, 1),
            }

        place = ServerOptions(
            comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype
        )
        super().__init__(opt, name, check, place)
        quorum = self._quorum = self._options["replicas_to_aggregate"]
        # Each worker may contribute so many gradients of one step.
        self._share = -(-quorum // self._workers)

    def _start(self, variables: list[Variable]) -> None:
        super()._start(variables)
        # The step at which the last gradient arrived, and how many were accepted there;
        # not saved, as they concern gradients that are pending.
        self._round, self._accepted = -1, 0

    def _after(self, served: Served, receipt: Receipt) -> None:
        if receipt.global_step != self._round:
            self._round, self._accepted = receipt.global_step, 0
        self._accepted += receipt.accepted
        enough = self._accepted >= self._share
        if not receipt.accepted or enough or served.server.step > self._round:
            super()._after(served, receipt)
        elif served.step < self._round:
            # More gradients of this rank are needed, with the parameters of now.
            served.useful = self._round
            served.pull()

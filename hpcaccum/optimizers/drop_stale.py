"""DropStaleGradientOptimizer: every gradient an update, unless it is too late."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import BoundedStalenessInbox

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.base import Loss, Optimizer
    from hpcaccum.optimizers.variable import Variable
    from hpcaccum.server import Inbox

Array = np.ndarray[Any, Any]


class DropStaleGradientOptimizer(OneSidedOptimizer):
    """Applies each gradient by itself if it is at most ``staleness`` updates late.

    A worker's lag is the number of updates admitted since it pulled the parameters
    that its gradient was computed with: in its last `compute_gradients` or, if it never
    calls that, when its variables were refreshed last. The check and the update are one
    unit, for all variables together: accepted, every variable is updated and the step
    rises by one; dropped, nothing changes but `stale_counter`.

    Args:
        opt: The optimizer that makes the updates, on the host.
        staleness: Largest lag accepted; -1 drops everything.
        use_locking: Ignored.
        name: For messages.
        comm, host, dedicated: See `OneSidedOptimizer`.

    Source: the behaviour of ``tf.contrib.opt``'s optimizer of this name, whose check
        and update are not one unit.
    """

    def __init__(
        self,
        opt: Optimizer,
        staleness: int,
        use_locking: bool = False,
        name: str = "DropStaleGradient",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
    ) -> None:
        options = {"staleness": lambda: _bound(staleness)}
        super().__init__(opt, name, options, comm=comm, host=host, dedicated=dedicated)
        self._staleness = _bound(staleness)
        self._computed_at: int | None = None

    def _make_inbox(self, size: int, dtype: np.dtype[Any]) -> Inbox:
        return BoundedStalenessInbox(
            self._group,
            self._host,
            size,
            dtype,
            max_lag=self._staleness,
            workers=self._workers,
        )

    def compute_gradients(
        self, loss: Loss, var_list: Any = None, *args: Any, **kwargs: Any
    ) -> list[tuple[Array | None, Variable]]:
        """Pull the newest parameters, then compute the gradients with them.

        The step of these parameters is that of all gradients applied until the next
        call: applied a second time, a gradient is late by its own first update.
        """
        pairs = super().compute_gradients(loss, var_list, *args, **kwargs)
        self._computed_at = self._step
        return pairs

    @property
    def _local_step(self) -> int:
        return self._step if self._computed_at is None else self._computed_at

    @property
    def stale_counter(self) -> int:
        """Gradients dropped so far, over all workers."""
        return sum(self.statistics().dropped)


def _bound(staleness: Any) -> int:
    if staleness is None:
        raise InvalidArgumentError("staleness must be an integer, got None")
    try:
        return operator.index(staleness)
    except TypeError:
        raise TypeError(f"staleness must be an integer, got {staleness!r}") from None

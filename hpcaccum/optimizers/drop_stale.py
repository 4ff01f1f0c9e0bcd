"""DropStaleGradientOptimizer: one update for each gradient that is not too stale."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import BoundedStalenessInbox, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.checks import Loss, Pairs, Variables
    from hpcaccum.optimizers.finite import OnNonfinite
    from hpcaccum.rows import RowPlace
    from hpcaccum.server import Inbox, ParameterServer, Servers


class DropStaleGradientOptimizer(OneSidedOptimizer):
    """Applies each gradient as one update if its lag is at most ``staleness``.

    A gradient's lag is the number of updates admitted since the worker pulled the
    parameters that it was computed with: in its last `compute_gradients` or, if it
    never calls that, at the last pull. Check and update are atomic, for all variables
    together: an accepted gradient updates every variable and increments the step; a
    dropped one changes only `stale_counter`.

    Args:
        opt: Makes the updates, on the host rank.
        staleness: Largest lag accepted; by default, twice the number of ranks that
            train. -1 drops everything.
        use_locking: Ignored.
        name: Name for messages.
        comm, host, dedicated, servers, on_nonfinite, min_workers: See
            `OneSidedOptimizer`.

    Source: the behavior of ``tf.contrib.opt``'s optimizer of this name, whose check
        and update are not atomic.
    """

    def __init__(
        self,
        opt: Optimizer,
        staleness: int | None = None,
        use_locking: bool = False,
        name: str = "DropStaleGradient",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
        servers: Servers = "auto",
        on_nonfinite: OnNonfinite = "accept",
        min_workers: int = 1,
    ) -> None:
        super().__init__(
            opt,
            name,
            lambda workers: {"staleness": _staleness(staleness, workers)},
            ServerOptions(comm, host, dedicated, servers, on_nonfinite, min_workers),
        )
        # The step of the parameters in the last compute_gradients; None before it.
        self._computed_at: int | None = None

    def _make_inbox(
        self, size: int, dtype: np.dtype[Any], rows: Sequence[RowPlace]
    ) -> Inbox:
        return BoundedStalenessInbox(
            self._group,
            self._root,
            size,
            dtype,
            max_lag=self._options["staleness"],
            workers=self._workers,
            what=self.get_name(),
        )

    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Pull the newest parameters, then compute the gradients with them.

        Their step is that of all gradients applied until the next call: a gradient that
        is applied twice lags behind its own first update.
        """
        pairs = super().compute_gradients(loss, var_list, *args, **kwargs)
        self._computed_at = self._step
        return pairs

    def _assign(self, server: ParameterServer) -> None:
        super()._assign(server)
        self._computed_at = None

    @property
    def _local_step(self) -> int:
        return self._step if self._computed_at is None else self._computed_at

    def _bound(self) -> str:
        return f"staleness={self._options['staleness']} is the largest lag accepted"

    @property
    def stale_counter(self) -> int:
        """Number of gradients dropped so far, of all workers."""
        return sum(self.statistics().dropped)


def _staleness(staleness: Any, workers: int) -> int:
    if staleness is None:
        return 2 * workers
    try:
        return operator.index(staleness)
    except TypeError:
        raise TypeError(f"staleness must be an integer, got {staleness!r}") from None

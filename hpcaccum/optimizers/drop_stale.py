"""DropStaleGradientOptimizer: one update for each gradient that is not too stale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.arguments import integer
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import Loss, Pairs, Variables
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import Lateness, ServerOptions, Servers, factors_of

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class DropStaleGradientOptimizer(OneSidedOptimizer):
    """Applies each gradient as one update if its lag is at most ``staleness``.

    A gradient's lag is the number of updates admitted since the worker pulled the
    parameters that it was computed with: in its last `compute_gradients` or, if it
    never calls that, at the last pull. Check and update are atomic, for all variables
    together: an accepted gradient updates every variable and increments the step; a
    dropped one changes only `stale_counter`. The update is made with
    weight * gradient.

    With ``lateness``, an accepted gradient is multiplied by a factor that depends on
    its lag, before the update: ``c := opt(c, lateness(lag) * gradient)``. The receipt
    has the factor.

    Args:
        opt: Makes the updates, on the host rank.
        staleness: Largest lag accepted; by default, twice the number of ranks that
            train. -1 drops everything.
        use_locking: Ignored.
        name: Name for messages.
        lateness: Factor of a gradient by its lag: "inverse", which is 1 / (1 + lag), or
            a callable that takes a lag and returns a number from 0 to 1. It is called
            at once, for each lag from 0 to ``staleness``, but not above 1000; larger
            lags have the factor of 1000. It must return the same on all ranks. By
            default all factors are 1.
        comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype: See
            `OneSidedOptimizer`.

    Source: the behavior of ``tf.contrib.opt``'s optimizer of this name, whose check
        and update are not atomic. Lateness: Zhang et al., Staleness-aware Async-SGD for
        Distributed Deep Learning, 2016 (arXiv:1511.05950).
    """

    def __init__(
        self,
        opt: Optimizer,
        staleness: int | None = None,
        use_locking: bool = False,
        name: str = "DropStaleGradient",
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
            most = 2 * workers if staleness is None else integer(staleness, "staleness")
            return {"staleness": most, "lateness": factors_of(lateness, most)}

        place = ServerOptions(
            comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype
        )
        super().__init__(opt, name, check, place)
        # The step of the parameters in the last compute_gradients; None before it.
        self._computed_at: int | None = None

    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Pull the newest parameters, then compute the gradients with them.

        Their step is that of all gradients applied until the next call: a gradient that
        is applied twice lags behind its own first update.
        """
        pairs = super().compute_gradients(loss, var_list, *args, **kwargs)
        self._computed_at = self._served[0].step
        return pairs

    def _assign(self) -> None:
        super()._assign()
        self._computed_at = None

    @property
    def _local_step(self) -> int:
        at = self._computed_at
        return super()._local_step if at is None else at

    @property
    def stale_counter(self) -> int:
        """Number of gradients dropped so far, of all workers."""
        return sum(self.statistics().dropped)

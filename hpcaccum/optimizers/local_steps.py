"""Local steps: each rank trains alone for a period, then pushes what has come of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import integer, positive_count
from hpcaccum.device import all_on_device, copyto, cupy, release
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import check_sparse
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.optimizers.wrapper import check_inner, one_thread
from hpcaccum.server import ServerOptions, factors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.checks import Loss, Pairs, Variables
    from hpcaccum.optimizers.finite import OnNonfinite
    from hpcaccum.optimizers.variable import Variable
    from hpcaccum.server import Lateness, ParameterServer, Servers


class LocalSteps(OneSidedOptimizer):
    """An optimizer whose ranks make local steps and push once a period. Collective.

    `inner` makes the local steps, on the variables of its rank, and `outer`, or
    `inner`, the updates of the center. Subclasses say what is pushed.
    """

    # Calls of `apply_gradients` in a period.
    _period: int

    def __init__(
        self,
        inner: Optimizer,
        outer: Optimizer | None,
        name: str,
        check: Callable[[int], Mapping[str, Any]],
        options: ServerOptions,
    ) -> None:
        super().__init__(inner, name, check, options, outer)
        self._calls = 0
        # What is pushed of variables on a device.
        self._on_device: dict[str, Array] = {}

    def _start(self, variables: list[Variable]) -> None:
        super()._start(variables)
        self._calls = 0

    def _end_server(self) -> None:
        super()._end_server()
        # The local steps begin anew, too.
        self.inner._kept_state(self._given_or_known(None)).forget()

    @one_thread
    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Compute the gradients at this rank's own variables; nothing is pulled."""
        variables = self._prepare(var_list)
        return Optimizer.compute_gradients(self, loss, variables, *args, **kwargs)

    def _drop(self, server: ParameterServer) -> Receipt:
        return server.drop(self._step)

    def _send(self, server: ParameterServer, pairs: Pairs, weight: float) -> Receipt:
        try:
            self._step_locally(server, pairs)
            self._calls += 1
            if self._calls % self._period:
                return Receipt(True, self._step, self._step, sent=False)
            return self._communicate(server, pairs)
        except BaseException:
            # Rows may have changed of which no push tells: pull all of them.
            server.forget(var.name for _, var in pairs)
            raise

    def _step_locally(self, server: ParameterServer, pairs: Pairs) -> None:
        """Make a local step, and keep what the next push needs."""
        raise NotImplementedError

    def _communicate(self, server: ParameterServer, pairs: Pairs) -> Receipt:
        """Push, and pull the new center."""
        raise NotImplementedError

    def _places(self, server: ParameterServer) -> Mapping[str, Array]:
        """Return arrays for the next push: this rank's buffer, or device memory."""
        if not all_on_device("variables", self._values.values()):
            return server.gradient_arrays()
        for name, value in self._values.items():
            if name not in self._on_device:
                dtype = accumulation_dtype(value.dtype)
                self._on_device[name] = cupy().zeros(value.shape, dtype)
        return self._on_device

    @one_thread
    def gradient_arrays(self) -> dict[str, Array]:
        """Return arrays in which a loss can compute its next gradients, by name.

        They are not the arrays that are pushed.

        Raises:
            InvalidArgumentError: Before `initialize`, or on a dedicated server.
        """
        self._training_server()
        return Optimizer.gradient_arrays(self)

    def _free(self) -> None:
        super()._free()
        release(self._on_device)


class LocalStepsOptimizer(LocalSteps):
    """Makes local steps, then pushes how far they have led: DiLoCo, local SGD.

    One call with gradient g, local variable x, center c, period T, k = ``quorum``::

        x := inner(x, g)
        every T-th call:   push c' - x, with the center c' of the last pull
                           c := outer(c, mean of k pushes), on the server;  x := c

    The pushed differences take the place of gradients: ``outer=SGD(1.0)`` sets the
    center to the mean of the local variables (local SGD), and DiLoCo uses
    ``Momentum(0.7, 0.9, use_nesterov=True)``. A push needs the traffic of one gradient.

    With a ``quorum``, the first k pushes that began with the same center make an
    update, and a later one of them is dropped, as in `SyncReplicasOptimizer`. Without
    it, each push is an update, discounted by ``lateness`` and dropped if its lag is
    more than ``staleness``, as in `DropStaleGradientOptimizer`. A rank whose push is
    dropped goes on with the newest center.

    The state of ``inner`` belongs to its rank and stays when x is set to the center;
    snapshots contain the state of ``outer`` only. `learning_rate` is that of ``inner``.
    Local steps after the last push do not count; `assign` and `restore` undo them. A
    variable whose gradient was None in all calls of a period is not part of its push.
    Variables cannot be sparse.

    Args:
        inner: Makes the local steps.
        outer: Makes the updates of the center, on the servers.
        period: T, the number of local steps of a push.
        quorum: Number of pushes in an update, at most that of the ranks that train. By
            default, each push is an update.
        staleness: Without a quorum, the largest lag accepted; unlimited by default.
        lateness: Without a quorum, see `DropStaleGradientOptimizer`.
        name: Name for messages.
        comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype: See
            `OneSidedOptimizer`. A call whose gradients are dropped makes no local step
            and does not count.

    Attributes:
        inner, outer: As given.

    Source: Douillard et al., DiLoCo, 2023 (arXiv:2311.08105); without a quorum, Liu et
        al., Asynchronous Local-SGD Training for Language Modeling, 2024
        (arXiv:2401.09135).
    """

    def __init__(
        self,
        inner: Optimizer,
        outer: Optimizer,
        period: int,
        *,
        quorum: int | None = None,
        staleness: int | None = None,
        lateness: Lateness = None,
        name: str = "LocalSteps",
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
        servers: Servers = "auto",
        on_nonfinite: OnNonfinite = "accept",
        min_workers: int = 1,
        wire_dtype: Any = None,
    ) -> None:
        def check(workers: int) -> dict[str, Any]:
            check_inner(outer, self)
            steps, most = positive_count(period, "period"), staleness
            if quorum is not None and (staleness, lateness) != (None, None):
                raise InvalidArgumentError(
                    "staleness and lateness are for updates by single pushes, without "
                    "a quorum: with one, late pushes are dropped"
                )
            if most is not None:
                most = integer(most, "staleness")
            count = None if quorum is None else positive_count(quorum, "quorum")
            if count is not None and count > workers:
                raise InvalidArgumentError(
                    f"quorum must be at most {workers}, the number of ranks that "
                    f"train, got {count}"
                )
            return {
                "outer": outer,
                "period": steps,
                "quorum": count,
                "staleness": most,
                "lateness": factors_of(lateness, math.inf if most is None else most),
            }

        place = ServerOptions(
            comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype
        )
        super().__init__(inner, outer, name, check, place)
        self._period = self._options["period"]
        self._quorum, self._factors = self._options["quorum"], self._options["lateness"]
        if (most := self._options["staleness"]) is not None:
            self._max_lag = most
        # The variables that have changed since the last pull: their values before are
        # where their differences will be pushed from.
        self._changed: set[str] = set()

    def _check_start(self, var_list: Variables | None) -> list[Variable]:
        variables = super()._check_start(var_list)
        needs = "an optimizer that pushes gradients, not differences"
        check_sparse(self.get_name(), variables, None, needs)
        return variables

    def _start(self, variables: list[Variable]) -> None:
        super()._start(variables)
        self._changed.clear()

    def _step_locally(self, server: ParameterServer, pairs: Pairs) -> None:
        grads = {var.name for grad, var in pairs if grad is not None}
        if new := grads - self._changed:
            places = self._places(server)
            for name in new:
                copyto(places[name], self._values[name])
            self._changed |= new
        self.inner.apply_gradients(pairs)

    def _communicate(self, server: ParameterServer, pairs: Pairs) -> Receipt:
        places = self._places(server)
        differences = {n: places[n] for n in self._values if n in self._changed}
        with np.errstate(all="ignore"):
            for name, place in differences.items():
                np.subtract(place, self._values[name], out=place)
        # Before the push: one that raises may have been accepted, and is not repeated.
        self._changed.clear()
        receipt = server.push(differences, self._step)
        self._after(server, receipt)
        return receipt

    def _assign(self, server: ParameterServer) -> None:
        super()._assign(server)
        self._changed.clear()

"""Local steps: each rank trains alone for a period, then pushes what has come of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import integer, positive_count
from hpcaccum.device import copyto, cupy, library, release
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import Loss, Pairs, Variables, check_sparse
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.optimizers.served import Served, fragments_of
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import check_inner, one_thread
from hpcaccum.server import Lateness, ServerOptions, Servers, factors_of

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class LocalSteps(OneSidedOptimizer):
    """An optimizer whose ranks make local steps and push once a period. Collective.

    `inner` makes the local steps, on the variables of its rank, and `outer`, or
    `inner`, the updates of the center. Subclasses say what is pushed.
    """

    _is_local = True
    # Calls of `apply_gradients` in a period.
    _period: int

    def _start(self, variables: list[Variable]) -> None:
        super()._start(variables)
        self._calls = 0
        # What is pushed of variables on a device.
        self._on_device: dict[str, Array] = {}
        self._forget_steps()

    def _end_server(self) -> None:
        super()._end_server()
        release(self._on_device)
        # The local steps begin anew, too.
        self.inner._kept_state(self._given_or_known(None)).forget()

    @one_thread
    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Compute the gradients at this rank's own variables; nothing is pulled."""
        variables = self._prepare(var_list)
        return Optimizer.compute_gradients(self, loss, variables, *args, **kwargs)

    def _forget_steps(self) -> None:
        """Do not push the local steps since the last push."""
        raise NotImplementedError

    def _send(self, pairs: Pairs, weight: float) -> Receipt:
        try:
            self._step_locally(pairs)
            self._calls += 1
            if (receipt := self._communicate(pairs)) is not None:
                return receipt
            step = self._served[0].step
            return Receipt(True, step, step, sent=False)
        except BaseException:
            # Rows may have changed of which no push tells: pull all of them.
            for served in self._served:
                served.server.forget(var.name for _, var in pairs)
            raise

    def _step_locally(self, pairs: Pairs) -> None:
        """Make a local step, and keep what the next push needs."""
        raise NotImplementedError

    def _communicate(self, pairs: Pairs) -> Receipt | None:
        """Push and pull what is due; return the receipt of a push."""
        raise NotImplementedError

    def _places(self, served: Served) -> Mapping[str, Array]:
        """Return arrays for the next push: this rank's buffer, or device memory."""
        if not served.server.on_device:
            return served.server.gradient_arrays()
        for name, value in served.values.items():
            if name not in self._on_device:
                dtype = accumulation_dtype(value.dtype)
                self._on_device[name] = cupy().zeros(value.shape, dtype)
        return self._on_device

    def _free(self) -> None:
        super()._free()
        if self._served:
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

    With ``fragments=F``, groups of variables are pushed one after the other. Each has a
    center, a step and a quorum of its own. Receipts have the step of a fragment;
    `global_step` and `statistics` count the updates and the pushes of all.

    With ``overlap=j``, a push does not wait. The rank takes the new center c, or the
    newest one if its push was dropped, j calls after the push of x', as
    ``x := c + (x - x')``. It waits only if the new center is not there by then.

    The state of ``inner`` belongs to its rank and stays when x is set to the center;
    snapshots contain the state of ``outer`` only. `learning_rate` is that of ``inner``.
    Local steps after the last push do not count; `assign` and `restore` undo them. A
    variable whose gradient was None in all calls of a period is not part of its push.
    Variables cannot be sparse.

    Args:
        inner: Makes the local steps.
        outer: Makes the updates of the center, on the servers. For fragments it must be
            a rule of this package, or what an adapter was given.
        period: T, the number of local steps of a push.
        quorum: Number of pushes in an update, at most that of the ranks that train. By
            default, each push is an update.
        staleness: Without a quorum, the largest lag accepted; unlimited by default.
        lateness: Without a quorum, see `DropStaleGradientOptimizer`.
        fragments: F, the number of groups of variables, in their order and of about the
            same size; at most the period and the number of variables. Number f, from 0,
            is pushed in the calls whose number modulo T is f T / F, rounded down. More
            than 1 is not for ``dedicated`` servers.
        overlap: Calls for which a push does not wait, fewer than the period.
        name: Name for messages.
        comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype: See
            `OneSidedOptimizer`. A call whose gradients are dropped makes no local step
            and does not count.

    Attributes:
        inner, outer: As given.

    Source: Douillard et al., DiLoCo, 2023 (arXiv:2311.08105); without a quorum, Liu et
        al., Asynchronous Local-SGD Training for Language Modeling, 2024
        (arXiv:2401.09135); fragments and overlap: Douillard et al., Streaming DiLoCo
        with overlapping communication, 2025 (arXiv:2501.18512).
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
        fragments: int = 1,
        overlap: int = 0,
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
            groups, later = _checked_overlap(fragments, overlap, steps)
            if groups > 1 and dedicated:
                raise InvalidArgumentError(
                    "fragments= needs servers that also train: each fragment has a "
                    "server thread; with dedicated=True, use fragments=1"
                )
            return {
                "outer": outer,
                "period": steps,
                "quorum": count,
                "staleness": most,
                "lateness": factors_of(lateness, math.inf if most is None else most),
                "fragments": groups,
                "overlap": later,
            }

        place = ServerOptions(
            comm, host, dedicated, servers, on_nonfinite, min_workers, wire_dtype
        )
        super().__init__(inner, name, check, place, outer)
        self._period = self._options["period"]
        self._quorum = self._options["quorum"]
        self._fragments = self._options["fragments"]
        self._overlap: int = self._options["overlap"]
        # The variables that have changed since the last pull: their values before are
        # where their differences will be pushed from. If a push of their fragment is
        # under way, since this push: their values then are in `_before`.
        self._changed: set[str] = set()
        self._before: dict[str, Array] = {}
        # Pushes whose answers are taken later, by number of a fragment.
        self._flights: dict[int, Receipt] = {}

    def _check_start(self, var_list: Variables | None) -> list[Variable]:
        variables = super()._check_start(var_list)
        needs = "an optimizer that pushes gradients, not differences"
        check_sparse(self.get_name(), variables, None, needs)
        if len(variables) < self._fragments:
            raise InvalidArgumentError(
                f"{self.get_name()}: fragments must be at most the number of "
                f"variables, which is {len(variables)}, got {self._fragments}"
            )
        for fragment in fragments_of(variables, self._fragments):
            self._outer_of(fragment)  # may raise
        return variables

    def _forget_steps(self) -> None:
        self._changed.clear()
        self._flights.clear()

    def _step_locally(self, pairs: Pairs) -> None:
        grads = {var.name for grad, var in pairs if grad is not None} - self._changed
        for number, served in enumerate(self._served):
            if new := grads.intersection(served.values):
                flies = number in self._flights
                places = self._before if flies else self._places(served)
                for name in new:
                    copyto(places[name], self._values[name])
                self._changed |= new
        self.inner.apply_gradients(pairs)

    def _communicate(self, pairs: Pairs) -> Receipt | None:
        receipt = None
        for number, served in enumerate(self._served):
            since = self._calls - number * self._period // self._fragments
            if number in self._flights and since % self._period == self._overlap:
                self._land(served, self._flights.pop(number))
            if since % self._period:
                continue
            receipt = self._push(served)
            if not self._overlap:
                self._after(served, receipt)
                continue
            if receipt:
                # Have what it will pull sent to this node.
                served.server.expect(receipt.global_step + 1)
            # Memory for values that change while a push is under way.
            for name, value in served.values.items():
                if name not in self._before:
                    self._before[name] = library(value).empty_like(value)
            self._flights[number] = receipt
        return receipt

    def _push(self, served: Served) -> Receipt:
        """Push the difference of a fragment."""
        places = self._places(served)
        differences = {n: places[n] for n in served.values if n in self._changed}
        with np.errstate(all="ignore"):
            for name, place in differences.items():
                np.subtract(place, self._values[name], out=place)
        # Before the push: one that raises may have been accepted, and is not repeated.
        self._changed -= differences.keys()
        return served.server.push(differences, served.step)

    def _land(self, served: Served, receipt: Receipt) -> None:
        """Pull the answer to a push; add what has changed since."""
        changed = self._changed.intersection(served.values)
        moved = {name: self._before[name] for name in changed}
        with np.errstate(all="ignore"):
            for name, before in moved.items():
                np.subtract(self._values[name], before, out=before)
        self._after(served, receipt)
        if not moved:
            return
        places = self._places(served)
        with np.errstate(all="ignore"):
            for name, difference in moved.items():
                value = self._values[name]
                copyto(places[name], value)
                np.add(value, difference, out=value)

    def _assign(self) -> None:
        super()._assign()
        self._forget_steps()

    def _free(self) -> None:
        super()._free()
        release(self._before)


def _checked_overlap(fragments: Any, overlap: Any, period: int) -> tuple[int, int]:
    """Return the number of fragments and the overlap."""
    groups, later = positive_count(fragments, "fragments"), integer(overlap, "overlap")
    if groups > period:
        raise InvalidArgumentError(
            f"fragments must be at most the period, which is {period}, got {groups}: "
            f"each is pushed once a period, in a call of its own"
        )
    if not 0 <= later < period:
        raise InvalidArgumentError(
            f"overlap must be at least 0 and less than the period, which is {period}, "
            f"got {later}"
        )
    return groups, later

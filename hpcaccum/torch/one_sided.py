"""The adapters of the strategies with a parameter server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hpcaccum.accumulator import Receipt
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import (
    AGNOptimizer,
    DropStaleGradientOptimizer,
    LocalStepsOptimizer,
    SyncReplicasOptimizer,
)
from hpcaccum.optimizers.adapter import ServerArguments
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import Lateness, Servers
from hpcaccum.torch.adapter import Adapter, in_stream
from hpcaccum.torch.parameters import Parameters
from hpcaccum.torch.rule import TorchRule
from hpcaccum.torch.tensors import check_optimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(ServerArguments, total=False):
    """What all adapters with a server accept by keyword; see `OneSided`."""

    module: torch.nn.Module | None
    buffers: str
    servers: Servers
    sparse: Iterable[torch.Tensor]
    capacity: int | None
    wire_dtype: torch.dtype | str | None


class OneSided(Adapter):
    """An adapter whose updates run on the parameters of one rank. Collective.

    The host has a copy of the parameters, the center, and a copy of the torch optimizer
    that updates it. Its options are those of the host's parameter groups: only a
    scheduler of the host changes the learning rate of the center. With ``servers``,
    several ranks have parts of both.

    `step` ends with the newest parameters, with which the next gradient is computed.
    The gradients then belong to the server, and each ``grad`` is None.

    Args:
        optimizer, make, module, buffers, comm: As for `Adapter`.
        host, dedicated, on_nonfinite, min_workers, wire_dtype: See `OneSidedOptimizer`.
        servers: The host, by default; or several ranks on different nodes, of which the
            first is the host. Each holds whole parameters, and a copy of the torch
            optimizer for them, which must update each parameter independently of the
            others, as all of `torch.optim` do.
        sparse: The parameters whose gradients are sparse, such as the weights of
            `torch.nn.Embedding(sparse=True)`; the same on all ranks. Only the rows of
            these gradients are sent, updated and pulled. This needs one server, and an
            optimizer that changes no other rows: `SparseAdam`, `SGD` without momentum
            and weight decay, or `Adagrad` without weight decay. Do not change such
            parameters in other ways.
        capacity: Maximum number of different rows in one such gradient; by default all
            rows. The server allocates memory for this number of rows for each rank.
    """

    _exchange: OneSidedOptimizer

    def _open(self) -> None:
        super()._open()
        self._root = self._exchange._root
        # First, as other hooks may change values.
        noted = self.optimizer.register_step_post_hook(
            lambda *_: self._parameters.note_values()
        )
        self.optimizer._optimizer_step_post_hooks.move_to_end(noted.id, last=False)
        self._handles.append(noted)
        self._parameters.note_values()

    def _update(self, weight: float) -> Receipt:
        self._parameters.check_values()
        if self._exchange._is_local:
            return self._apply(weight)
        # Instead of the step of the optimizer, with its hooks.
        step = torch.optim.Optimizer.profile_hook_step(
            lambda _: self._exchange_once(weight)
        )
        receipt: Receipt = step(self.optimizer)
        return receipt

    def _exchange_once(self, weight: float) -> Receipt:
        receipt = self._apply(weight)
        # What the next gradient is to be computed with.
        self._parameters.clear()
        nothing = [None] * len(self._parameters.variables)
        self._exchange.compute_gradients(lambda: (None, nothing))
        return receipt

    def _apply(self, weight: float) -> Receipt:
        pairs = self._parameters.pairs()
        if all(grad is None for grad, _ in pairs):
            raise self._no_gradient()
        return self._exchange.apply_gradients(pairs, weight=weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters, the state and the counts of one step; host only."""
        if self._group.rank != self._root:
            raise InvalidArgumentError(
                f"{self._what}: the state is that of rank {self._root}; call "
                f"state_dict() there"
            )
        return super().state_dict()

    @in_stream
    def serve(self, after_update: Callable[[int], object] | None = None) -> None:
        """Serve until all other ranks have left; servers of ``dedicated=True`` only.

        Args:
            after_update: Called on the host with the step after each update; the next
                one waits for it. It may call `state_dict`, or a scheduler.
        """
        # A scheduler that is called there warns unless `step` was called before.
        self._opt_called = self.optimizer._opt_called = True
        self._exchange.serve(after_update)

    def _check_options(self, groups: Any) -> None:
        self._rule.check_options(groups)

    def _restore(self, snapshot: Any, what: str) -> None:
        self._parameters.clear()
        # The state of local updates, of AGN, begins anew.
        self.state.clear()
        self._exchange.restore(snapshot, self._parameters.variables.values())

    def _before_free(self) -> None:
        # Otherwise others might wait for its gradients.
        self._exchange.leave()
        failure = None
        try:
            # The last parameters are still to come.
            self._parameters.reclaim()
            self._parameters.check_values()
        except InvalidArgumentError as error:
            failure = error
        self._group.raise_together(f"{self._what}: free", failure)


class SyncReplicas(OneSided):
    """Updates with the mean of ``replicas_to_aggregate`` gradients of one step.

    The first gradients make an update, later ones of the same step are dropped or, with
    ``lateness``, join the next one: see `hpcaccum.SyncReplicasOptimizer`. Collective.

    Args:
        optimizer: Of `torch.optim`; a copy on the host makes the updates.
        replicas_to_aggregate: Least number of gradients in an update; by default, as
            that of `hpcaccum.SyncReplicasOptimizer`.
        lateness: Factor of a gradient that is one step late: "inverse", or a callable.
        options: See `OneSided`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas_to_aggregate: int | None = None,
        *,
        lateness: Lateness = None,
        **options: Unpack[Options],
    ) -> None:
        make = functools.partial(
            SyncReplicasOptimizer,
            replicas_to_aggregate=replicas_to_aggregate,
            lateness=lateness,
        )
        super().__init__(optimizer, make, **options)


class DropStale(OneSided):
    """Applies each gradient as one update if its lag is at most ``staleness``.

    See `hpcaccum.DropStaleGradientOptimizer`. Collective.

    Args:
        optimizer: Of `torch.optim`; a copy on the host makes the updates.
        staleness: Largest lag accepted; by default, twice the number of ranks.
        lateness: Factor of a gradient by its lag: "inverse", or a callable.
        options: See `OneSided`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        staleness: int | None = None,
        *,
        lateness: Lateness = None,
        **options: Unpack[Options],
    ) -> None:
        make = functools.partial(
            DropStaleGradientOptimizer, staleness=staleness, lateness=lateness
        )
        super().__init__(optimizer, make, **options)


class AGN(OneSided):
    """Makes local steps, and pushes the mean gradient of each ``communication_period``.

    The torch optimizer makes the local steps, and a copy of it on the host those of the
    center, one for each push: see `hpcaccum.AGNOptimizer`. Collective. With n ranks and
    a period T larger than n, begin with a learning rate T / n times that of one rank.

    Args:
        optimizer: Of `torch.optim`.
        communication_period: Number of steps in a push.
        options: See `OneSided`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        communication_period: int = 10,
        **options: Unpack[Options],
    ) -> None:
        make = functools.partial(
            AGNOptimizer, communication_period=communication_period
        )
        super().__init__(optimizer, make, **options)


class LocalSteps(OneSided):
    """Makes local steps, and pushes how far they have led: DiLoCo, local SGD.

    The torch optimizer makes the local steps, and the outer one, on the host, those of
    the center: see `hpcaccum.LocalStepsOptimizer`. Collective. For DiLoCo, the outer
    optimizer is `torch.optim.SGD(params, 0.7, momentum=0.9, nesterov=True)`.

    `state_dict` has the state and the options of the outer optimizer. Those of the
    torch optimizer differ between ranks: save its own `state_dict` on each of them.

    Args:
        optimizer: Of `torch.optim`.
        outer: Called with the list of the parameters; returns an optimizer of them,
            with any options. A copy on the host makes the updates; its options are
            those of the host.
        period: Number of steps in a push.
        quorum, staleness, lateness, fragments, overlap: As for `LocalStepsOptimizer`.
        options: See `OneSided`.

    Attributes:
        outer: The outer optimizer.
    """

    outer: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        period: int = 50,
        *,
        quorum: int | None = None,
        staleness: int | None = None,
        lateness: Lateness = None,
        fragments: int = 1,
        overlap: int = 0,
        **options: Unpack[Options],
    ) -> None:
        def make(rule: TorchRule, **given: Any) -> LocalStepsOptimizer:
            self.outer, of_center = self._group.agree(
                self._what, lambda: checked_outer(outer, rule), lambda _: {}
            )
            self._saved = self.outer
            return LocalStepsOptimizer(
                rule,
                of_center,
                period,
                quorum=quorum,
                staleness=staleness,
                lateness=lateness,
                fragments=fragments,
                overlap=overlap,
                **given,
            )

        super().__init__(optimizer, make, **options)


def checked_outer(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], rule: TorchRule
) -> tuple[torch.optim.Optimizer, TorchRule]:
    """Return the optimizer of the center for the parameters of a rule, and its rule."""
    tensors = rule.parameters.tensors
    outer = make(list(tensors.values()))
    check_optimizer(outer, Adapter)
    groups = outer.param_groups
    if {p for group in groups for p in group["params"]} != {*tensors.values()}:
        raise InvalidArgumentError(
            "outer must return an optimizer of all the parameters that it gets"
        )
    return outer, TorchRule(outer, Parameters(tensors))

"""Optimizers with a parameter server, whose updates are made by a rule of optax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import fitting
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.jax.rule import OptaxRule
from hpcaccum.jax.structure import Structure
from hpcaccum.mpi import Group, group_of
from hpcaccum.optimizers import (
    AGNOptimizer,
    DropStaleGradientOptimizer,
    LocalStepsOptimizer,
    SyncReplicasOptimizer,
)
from hpcaccum.optimizers.adapter import AdapterBase, ServerArguments, check_known
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.server import Lateness

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI
    from typing_extensions import Unpack


class Options(ServerArguments, total=False):
    """What all optimizers of this module accept by keyword; see `OneSided`."""

    wire_dtype: Any
    extra: Mapping[str, Any]
    snapshot: Any


class OneSided(AdapterBase):
    """A pytree of parameters on a server, and this rank's copy of it. Collective.

    All ranks start with the parameters of the host rank, which makes the updates.

    Args:
        optax_rule: A GradientTransformation that `jax.jit` can compile. `average` may
            not be part of it.
        params: A pytree of float arrays, of the same structure on all ranks.
        make: Makes the optimizer that exchanges gradients, of a rule and ``options``.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host, dedicated, on_nonfinite, min_workers, wire_dtype: See `OneSidedOptimizer`.
        extra: Arguments of the rule's ``update`` that `push` passes by name, such as
            ``{"value": 0.0}`` for the loss: floats, or pytrees of float arrays, of
            which only shapes and dtypes are used. They are sent, averaged and dropped
            together with the gradients.
        snapshot: On the host rank, what `snapshot` returned, to continue from it; other
            ranks may pass None.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
    """

    _exchange: OneSidedOptimizer

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        make: Callable[..., OneSidedOptimizer],
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
        snapshot: Any = None,
        **options: Any,
    ) -> None:
        self._what, group = f"hpcaccum.jax.{type(self).__name__}", group_of(comm)
        check_known(self._what, options, Options.__annotations__)

        def check() -> OptaxRule:
            structure = Structure.of(params).check("params")
            return OptaxRule(optax_rule, structure, Structure.of(dict(extra)))

        rule = group.agree(self._what, check, OptaxRule.facts)
        self._structure, self._extra = rule.structure, rule.extra
        self._variables = self._structure.variables(params)
        # Extra arguments travel as gradients of variables that never change.
        self._all = [*self._variables, *self._extra.variables(dict(extra), "extra")]
        # No rule of optax can update a part of the parameters.
        self._exchange = make(
            rule, name=self._what, comm=group, servers=None, **options
        )
        self._start(group, self._exchange._root, snapshot)
        self._params = self._copy()

    def _start(self, group: Group, host: int, snapshot: Any) -> None:
        """Set all ranks' variables to those of the host, or of its snapshot."""
        call = f"{self._what}: snapshot"
        given = group.allgather(snapshot is not None, call)
        if given[host]:
            self._exchange.restore(snapshot, self._all)
        elif any(given):
            raise InvalidArgumentError(
                f"{call} must be passed on rank {host}, which is the host; only "
                f"{format_ranks(rank for rank, has in enumerate(given) if has)} did so"
            )
        else:
            self._exchange.initialize(self._all)

    def _copy(self) -> Any:
        return self._structure.pack(var.value for var in self._variables)

    @property
    def params(self) -> Any:
        """The parameters of the last `push`; after `free`, those of the last update."""
        return self._params

    def push(
        self, grads: Any, *, weight: float = 1.0, **extra: Any
    ) -> tuple[Any, Receipt]:
        """Send gradients to the host rank; wait as the optimizer promises.

        Args:
            grads: A pytree with the structure of the parameters, computed with the last
                parameters that this rank got.
            weight: What they count, such as the number of samples in their batch. The
                mean of `SyncReplicas` is sum(weight * gradient) / sum(weight). With
                `DropStale` and `AGN`, it multiplies the gradients.
            extra: The arguments of the rule that the constructor's ``extra`` names. A
                rule gets the mean of the values that came with the gradients of an
                update, with the same weights.

        Returns:
            The new parameters, in arrays that later calls do not change, and a receipt
            for the gradients.

        Raises:
            InvalidArgumentError, TypeError: On this rank; nothing is sent.
        """
        arrays = self._structure.flatten("grads", grads)
        what = f"{self._what}: the extra arguments that the constructor's extra= names"
        arrays += self._extra.flatten(what, extra)
        pairs = list(zip(arrays, self._all, strict=True))
        receipt = self._exchange.apply_gradients(pairs, weight=weight)
        self._params = self._copy()
        return self._params, receipt

    def assign(self, params: Any) -> Any:
        """Set the parameters of all ranks, and of the server, to those given.

        Collective: all ranks call it, including those that have left, between two
        updates of the server. The rule's state and the counts do not change; see
        `OneSidedOptimizer.assign`. A dedicated server takes part in `serve`.

        Args:
            params: A pytree with the structure of the parameters, on the host or, if
                that only serves, on the first rank that trains; others may pass None.

        Returns:
            The parameters, on all ranks, in arrays that later calls do not change.

        Raises:
            InvalidArgumentError, TypeError: On every rank, if they do not fit; nothing
                is changed.
        """

        def take(is_source: bool) -> None:
            if not is_source:
                return
            leaves = self._structure.flatten("params", params)
            arrays = [
                fitting(f"leaf {var.name} of params", leaf, var.value)
                for var, leaf in zip(self._variables, leaves, strict=True)
            ]
            for var, array in zip(self._variables, arrays, strict=True):
                np.copyto(var.value, array, casting="same_kind")

        self._exchange.before_assign = take
        self._exchange.assign()
        self._params = self._copy()
        return self._params

    def center(self) -> Any:
        """Return the newest parameters of the host rank, all of one step."""
        return self._structure.pack(self._exchange.center(self._variables))

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the parameters and of the rule's state, of one step.

        On the host rank only; see `OneSidedOptimizer.snapshot`. `checkpoint.save`
        writes it to a file.
        """
        return self._exchange.snapshot()

    def serve(self, after_update: Callable[[int], object] | None = None) -> None:
        """Serve until all other ranks have left; only the host of ``dedicated=True``.

        Args:
            after_update: Called with the step after each update; it may call
                `snapshot`.
        """
        self._exchange.serve(after_update)
        self._params = self._copy()

    def leave(self) -> None:
        """Declare that this rank contributes no more gradients. Not collective."""
        self._exchange.leave()

    def _free(self) -> None:
        self._exchange.free()
        self._params = self._copy()


class DropStale(OneSided):
    """Applies each gradient as one update if its lag is at most ``staleness``.

    See `DropStaleGradientOptimizer`. A gradient's lag is the number of updates since
    the `push` that returned the parameters it was computed with.

    Args:
        optax_rule, params, options: See `OneSided`.
        staleness: Largest lag accepted, by default twice the number of ranks; -1 drops
            everything.
        lateness: Factor of a gradient by its lag: "inverse", or a callable.
    """

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        staleness: int | None = None,
        *,
        lateness: Lateness = None,
        **options: Unpack[Options],
    ) -> None:
        make = functools.partial(
            DropStaleGradientOptimizer, staleness=staleness, lateness=lateness
        )
        super().__init__(optax_rule, params, make, **options)


class SyncReplicas(OneSided):
    """Updates with the mean of ``replicas_to_aggregate`` gradients of one step.

    See `SyncReplicasOptimizer`.

    Args:
        optax_rule, params, options: See `OneSided`.
        replicas_to_aggregate: Least number of gradients in an update; by default, as
            that of `SyncReplicasOptimizer`.
        lateness: Factor of a gradient that is one step late: "inverse", or a callable.
    """

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
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
        super().__init__(optax_rule, params, make, **options)


class AGN(OneSided):
    """Makes T local updates, then pushes the mean of its T gradients once.

    See `AGNOptimizer`. `push` updates this rank's parameters; every T-th call sends the
    mean, and returns the parameters of the host rank. The rule has a state on each
    rank, and one for the parameters of the host.

    Args:
        optax_rule, params, options: See `OneSided`.
        communication_period: T, at least 1.
    """

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        communication_period: int = 10,
        **options: Unpack[Options],
    ) -> None:
        make = functools.partial(
            AGNOptimizer, communication_period=communication_period
        )
        super().__init__(optax_rule, params, make, **options)


class LocalSteps(OneSided):
    """Makes T local updates, then pushes how far they have led: DiLoCo, local SGD.

    See `LocalStepsOptimizer`. `push` updates this rank's parameters; every T-th call
    sends their difference to those of the host, and returns these. For DiLoCo, the
    outer rule is ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. `snapshot` has the
    state of the outer rule; that of the other one belongs to each rank, and begins
    anew.

    Args:
        optax_rule, params, options: See `OneSided`. The arguments that ``extra`` names
            are those of ``optax_rule``.
        outer_rule: A GradientTransformation that updates the parameters of the host.
        period: T, at least 1.
        quorum, staleness, lateness, fragments, overlap: As for `LocalStepsOptimizer`.
            The outer rule updates each fragment independently of the others.
    """

    def __init__(
        self,
        optax_rule: Any,
        outer_rule: Any,
        params: Any,
        period: int = 50,
        *,
        quorum: int | None = None,
        staleness: int | None = None,
        lateness: Lateness = None,
        fragments: int = 1,
        overlap: int = 0,
        **options: Unpack[Options],
    ) -> None:
        def make(rule: OptaxRule, **given: Any) -> LocalStepsOptimizer:
            outer = given["comm"].agree(
                self._what,
                lambda: OptaxRule(outer_rule, rule.structure, rule.extra, "outer"),
                lambda _: {},
            )
            return LocalStepsOptimizer(
                rule,
                outer,
                period,
                quorum=quorum,
                staleness=staleness,
                lateness=lateness,
                fragments=fragments,
                overlap=overlap,
                **given,
            )

        super().__init__(optax_rule, params, make, **options)

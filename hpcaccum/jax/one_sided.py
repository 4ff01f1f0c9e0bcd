"""Optimizers with a parameter server, whose updates are made by a rule of optax."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from hpcaccum.arguments import fitting
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.jax.rule import OptaxRule
from hpcaccum.jax.structure import Structure
from hpcaccum.mpi import Freeable, Group, group_of
from hpcaccum.optimizers import (
    AGNOptimizer,
    DropStaleGradientOptimizer,
    LocalStepsOptimizer,
    SyncReplicasOptimizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpi4py import MPI as mpi4py_MPI
    from typing_extensions import Unpack

    from hpcaccum.accumulator import Receipt, Tally
    from hpcaccum.optimizers.finite import OnNonfinite
    from hpcaccum.optimizers.one_sided import OneSidedOptimizer
    from hpcaccum.server import Lateness


class Options(TypedDict, total=False):
    """What all optimizers of this module accept by keyword; see `OneSided`."""

    comm: mpi4py_MPI.Comm | Group | None
    host: int
    dedicated: bool
    on_nonfinite: OnNonfinite
    min_workers: int
    wire_dtype: Any
    extra: Mapping[str, Any]
    snapshot: Any


class OneSided(Freeable):
    """A pytree of parameters on a server, and this rank's copy of it. Collective.

    All ranks start with the parameters of the host rank, which makes the updates.

    Args:
        optax_rule: A GradientTransformation that `jax.jit` can compile. `average` may
            not be part of it.
        params: A pytree of float arrays, of the same structure on all ranks.
        strategy: The options that only this strategy has, by name.
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

    # The optimizer of hpcaccum that has this strategy.
    _strategy: Callable[..., OneSidedOptimizer]

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        strategy: Mapping[str, Any],
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
        on_nonfinite: OnNonfinite = "accept",
        min_workers: int = 1,
        wire_dtype: Any = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
        snapshot: Any = None,
    ) -> None:
        self._name, group = f"hpcaccum.jax.{type(self).__name__}", group_of(comm)

        def check() -> OptaxRule:
            structure = Structure.of(params).check("params")
            return OptaxRule(optax_rule, structure, Structure.of(dict(extra)))

        rule = self._rule = group.agree(self._name, check, OptaxRule.facts)
        self._structure, self._extra = rule.structure, rule.extra
        self._variables = self._structure.variables(params)
        # Extra arguments travel as gradients of variables that never change.
        self._all = [*self._variables, *self._extra.variables(dict(extra), "extra")]
        self._opt = self._make(
            rule,
            {
                **strategy,
                "name": self._name,
                "comm": group,
                "host": host,
                "dedicated": dedicated,
                "on_nonfinite": on_nonfinite,
                "min_workers": min_workers,
                "wire_dtype": wire_dtype,
            },
        )
        self._start(group, host, snapshot)
        self._params = self._copy()

    def _make(self, rule: OptaxRule, options: dict[str, Any]) -> OneSidedOptimizer:
        """Return the optimizer that exchanges the gradients. Collective."""
        return self._strategy(rule, **options)

    def _start(self, group: Group, host: int, snapshot: Any) -> None:
        """Set all ranks' variables to those of the host, or of its snapshot."""
        call = f"{self._name}: snapshot"
        given = group.allgather(snapshot is not None, call)
        if given[host]:
            self._opt.restore(snapshot, self._all)
        elif any(given):
            raise InvalidArgumentError(
                f"{call} must be passed on rank {host}, which is the host; only "
                f"{format_ranks(rank for rank, has in enumerate(given) if has)} did so"
            )
        else:
            self._opt.initialize(self._all)

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
        what = f"{self._name}: the extra arguments that the constructor's extra= names"
        arrays += self._extra.flatten(what, extra)
        pairs = list(zip(arrays, self._all, strict=True))
        receipt = self._opt.apply_gradients(pairs, weight=weight)
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

        self._opt.before_assign = take
        self._opt.assign()
        self._params = self._copy()
        return self._params

    def center(self) -> Any:
        """Return the newest parameters of the host rank, all of one step."""
        return self._structure.pack(self._opt.center(self._variables))

    @property
    def global_step(self) -> int:
        """Number of updates so far; after `free`, in total."""
        return self._opt.global_step

    def every(self, n: int) -> bool:
        """Return whether training has reached a multiple of n. Not collective.

        As `every` of the optimizer of the same strategy.
        """
        return self._opt.every(n)

    def statistics(self) -> Tally:
        """Return how many gradients of each rank were accepted and dropped so far."""
        return self._opt.statistics()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the parameters and of the rule's state, of one step.

        On the host rank only; see `OneSidedOptimizer.snapshot`. `checkpoint.save`
        writes it to a file.
        """
        return self._opt.snapshot()

    def serve(self, after_update: Callable[[int], object] | None = None) -> None:
        """Serve until all other ranks have left; only the host of ``dedicated=True``.

        Args:
            after_update: Called with the step after each update; it may call
                `snapshot`.
        """
        self._opt.serve(after_update)
        self._params = self._copy()

    def leave(self) -> None:
        """Declare that this rank contributes no more gradients. Not collective."""
        self._opt.leave()

    def _describe(self) -> str:
        return self._name

    def _free(self) -> None:
        self._opt.free()
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

    _strategy = DropStaleGradientOptimizer

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        staleness: int | None = None,
        *,
        lateness: Lateness = None,
        **options: Unpack[Options],
    ) -> None:
        strategy = {"staleness": staleness, "lateness": lateness}
        super().__init__(optax_rule, params, strategy, **options)


class SyncReplicas(OneSided):
    """Updates with the mean of ``replicas_to_aggregate`` gradients of one step.

    See `SyncReplicasOptimizer`.

    Args:
        optax_rule, params, options: See `OneSided`.
        replicas_to_aggregate: Least number of gradients in an update; by default, as
            that of `SyncReplicasOptimizer`.
        lateness: Factor of a gradient that is one step late: "inverse", or a callable.
    """

    _strategy = SyncReplicasOptimizer

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        replicas_to_aggregate: int | None = None,
        *,
        lateness: Lateness = None,
        **options: Unpack[Options],
    ) -> None:
        strategy = {
            "replicas_to_aggregate": replicas_to_aggregate,
            "lateness": lateness,
        }
        super().__init__(optax_rule, params, strategy, **options)


class AGN(OneSided):
    """Makes T local updates, then pushes the mean of its T gradients once.

    See `AGNOptimizer`. `push` updates this rank's parameters; every T-th call sends the
    mean, and returns the parameters of the host rank. The rule has a state on each
    rank, and one for the parameters of the host.

    Args:
        optax_rule, params, options: See `OneSided`.
        communication_period: T, at least 1.
    """

    _strategy = AGNOptimizer

    def __init__(
        self,
        optax_rule: Any,
        params: Any,
        communication_period: int = 10,
        **options: Unpack[Options],
    ) -> None:
        strategy = {"communication_period": communication_period}
        super().__init__(optax_rule, params, strategy, **options)


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
        quorum: Number of pushes in an update; by default, each push is one.
        staleness, lateness: Without a quorum, as for `DropStale`.
        fragments: Number of groups of leaves, which are pushed one after the other. The
            outer rule updates each group independently of the others.
        overlap: Number of calls for which a push does not wait.
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
        self._outer_rule = outer_rule
        strategy = {
            "period": period,
            "quorum": quorum,
            "staleness": staleness,
            "lateness": lateness,
            "fragments": fragments,
            "overlap": overlap,
        }
        super().__init__(optax_rule, params, strategy, **options)

    def _make(self, rule: OptaxRule, options: dict[str, Any]) -> OneSidedOptimizer:
        def check() -> OptaxRule:
            return OptaxRule(self._outer_rule, rule.structure, rule.extra, "outer")

        outer = options["comm"].agree(self._name, check, lambda _: {})
        return LocalStepsOptimizer(rule, outer, **options)

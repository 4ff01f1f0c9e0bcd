"""CrossShardOptimizer: gradients summed or averaged over the ranks of a shard group."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import all_on_device, cupy, release
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import (
    Exchange,
    Optimizer,
    check_global_step,
    check_pairs,
    check_variables,
    listed,
    scaled,
)
from hpcaccum.optimizers.start import broadcast, check_floats, compare, warn_of_wider
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import Wrapper
from hpcaccum.reducer import Reducer, check_direct

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.optimizers.base import Loss

Array = np.ndarray[Any, Any]


class Reduction:
    """How gradients of the ranks become one; the values are TensorFlow's."""

    MEAN = "weighted_mean"
    SUM = "weighted_sum"


class CrossShardOptimizer(Wrapper):
    """Sums gradients over the ranks of a shard group before the update. Collective.

    With `Reduction.MEAN`, `compute_gradients` scales by one over the size of the group,
    so that what lies between it and `apply_gradients` (clipping, say) sees gradients
    that are divided already; `apply_gradients` only sums. Every rank calls both, the
    same number of times.

    All ranks of a group begin with the variables of its first one, the rank that the
    group's list names first: `initialize` broadcasts them, once. Variables of several
    dtypes may go together, but gradients are exchanged in the widest of their dtypes; a
    warning then says which variables have it.

    Args:
        opt: Makes the updates, the same on every rank of a group.
        reduction: ``Reduction.MEAN`` or ``Reduction.SUM``.
        name: For messages.
        group_assignment: Lists of ranks, each a group of its own; together they name
            each rank once, and all are of one size. None: one group of all.
        comm: Communicator of the ranks; COMM_WORLD by default.
        cuda_aware: Whether MPI is given the memory of a device; see `Reducer`.
        sync: Whether to broadcast. If not, `initialize` compares checksums of the
            variables and raises unless they are the same.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.

    Source: the behaviour of ``tf.compat.v1.tpu.CrossShardOptimizer``.
    """

    exchange = Exchange.COLLECTIVE

    def __init__(
        self,
        opt: Optimizer,
        reduction: str = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list[list[int]] | None = None,
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        cuda_aware: bool = False,
        sync: bool = True,
    ) -> None:
        group = Group.of(comm)

        def facts() -> dict[str, object]:
            Wrapper.__init__(self, opt, name)
            if reduction not in (Reduction.MEAN, Reduction.SUM):
                raise InvalidArgumentError(
                    f"reduction must be Reduction.MEAN or Reduction.SUM, got "
                    f"{reduction!r}"
                )
            check_direct(cuda_aware, "flat")
            return {
                "optimizer": type(opt).__name__,
                "reduction": reduction,
                "cuda_aware": bool(cuda_aware),
                "group_assignment": check_groups(group_assignment, group.size),
                "sync": bool(sync),
            }

        group.agree(type(self).__name__, facts)
        self._shard = group.split(group_assignment) if group_assignment else None
        self._group = self._shard or group
        # Ranks of the group, as the user numbers them.
        everybody = group_assignment or [list(range(group.size))]
        self._ranks = next(ranks for ranks in everybody if group.rank in ranks)
        self._sync = bool(sync)
        mean = reduction == Reduction.MEAN and self._group.size > 1
        self._scale = 1 / self._group.size if mean else 1.0
        self._reducer: Reducer | None = None
        self._direct = bool(cuda_aware)
        self._values: dict[str, Array] = {}
        # Results, of variables on a device.
        self._sums: dict[str, Array] = {}
        self._computed, self._fused = 0, False

    def initialize(self, var_list: Any) -> None:
        """Set a group's variables to its first rank's; make the exchange. Collective.

        Done by the first `compute_gradients` or `apply_gradients` otherwise.

        Raises:
            TypeError, InvalidArgumentError: On every rank, for something else than
                variables, or one of integers.
            DisagreementError: On every rank of a group, for different variables; with
                ``sync=False`` also for different values.
        """
        self._prepare(var_list, None)

    def _prepare(self, var_list: Any, error: Exception | None) -> None:
        """Initialize, or raise on every rank what is wrong on this one. Collective."""
        self._check_open()
        if self._reducer is not None:
            if error is not None:
                self._reducer.fail(error)
            return
        checked: list[Variable] = []

        def facts() -> dict[str, object]:
            if error is not None:
                raise error
            checked.extend(check_variables(var_list))
            check_floats(checked)
            self._take_place(checked)
            names = [(var.name, var.shape, str(var.dtype)) for var in checked]
            return {"optimizer": self.inner, "variables": names}

        what = f"{self.get_name()}: initialize"
        self._group.agree(what, facts)
        if self._sync:
            broadcast(self._group, checked, what)
        else:
            compare(self._group, checked, self._ranks, what)
        if self._ranks[self._group.rank] == 0:
            warn_of_wider(self.get_name(), checked)
        super().initialize(checked)
        self._values = {var.name: var.value for var in checked}
        self.inner.initialize(checked)
        self._reducer = Reducer(
            Layout.of(self._values),
            self._group,
            self.get_name(),
            schedule="flat" if self._direct else "auto",
            cuda_aware=self._direct,
        )

    def _take_place(self, variables: list[Variable]) -> None:
        """Take memory for results on the device, if variables are there."""
        values = {var.name: var.value for var in variables}
        if all_on_device("variables", values.values()):
            layout = Layout.of(values)
            self._sums = layout.views(cupy().zeros(layout.size, layout.dtype))

    def gradient_arrays(self) -> dict[str, Array]:
        """Return memory in which gradients are exchanged without a copy, by name.

        The same arrays each time, in the dtype in which gradients are summed. For
        variables on a device it is memory there, from where they are copied.
        """
        if self._reducer is None or self._sums:
            return super().gradient_arrays()
        return self._reducer.arrays()

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients and apply their mean or sum; as the two calls do.

        Nobody sees the gradients in between, so the mean is formed where they are
        summed, which saves a pass over them.
        """
        own = type(self)
        self._fused = (
            own.compute_gradients is CrossShardOptimizer.compute_gradients
            and own.apply_gradients is CrossShardOptimizer.apply_gradients
        )
        try:
            return super().minimize(*args, **kwargs)
        finally:
            self._fused = False

    def compute_gradients(
        self, loss: Loss, var_list: Any = None, *args: Any, **kwargs: Any
    ) -> list[tuple[Array | None, Variable]]:
        """Compute the gradients of this rank's share of the loss."""
        variables = self._variables if var_list is None else listed(var_list)
        self.initialize(variables)
        pairs = self.inner.compute_gradients(loss, variables, *args, **kwargs)
        self._computed += 1
        if self._scale == 1.0 or self._fused:
            return pairs
        return [
            (None if grad is None else self._scaled(grad, var), var)
            for grad, var in pairs
        ]

    def _scaled(self, grad: Array, var: Variable) -> Array:
        assert self._reducer is not None
        if grad is not self._reducer.arrays().get(var.name):
            return scaled(grad, self._scale)
        # It lies where it is exchanged, and stays there.
        grad *= grad.dtype.type(self._scale)
        return grad

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> Any:
        """Sum the gradients over the group, then let the inner optimizer update.

        Args:
            grads_and_vars: Pairs; a gradient of None must be None on all ranks.
            global_step: For the inner optimizer.
            name: Ignored.

        Raises:
            InvalidArgumentError, TypeError: On every rank of the group, if the pairs of
                one are wrong; no variable is changed.
            DisagreementError: On every rank of the group, before any update, if a
                gradient is None on some ranks only, or if ranks have called
                `compute_gradients` a different number of times.
        """
        pairs: list[tuple[Array | None, Variable]] = []
        problem: Exception | None = None
        try:
            pairs = check_pairs(grads_and_vars)
            check_global_step(global_step)
            self._check_known(pairs)
        except (TypeError, InvalidArgumentError) as error:
            problem = error
        self._prepare([var for _, var in pairs], problem)
        assert self._reducer is not None
        grads = {var.name: grad for grad, var in pairs if grad is not None}
        # A rank that threw away what it computed would be one step ahead.
        mean = self._fused and self._scale != 1.0
        kind = "MEAN" if mean else "SUM"
        sums = self._reducer.reduce(
            grads,
            out={name: self._sums[name] for name in grads} if self._sums else None,
            step=self._computed,
            reduction_type=kind,
        )
        summed = [(None if g is None else sums[v.name], v) for g, v in pairs]
        return self.inner.apply_gradients(summed, global_step, name)

    def _check_known(self, pairs: list[Any]) -> None:
        for _, var in pairs if self._reducer is not None else []:
            if self._values.get(var.name) is not var.value:
                raise InvalidArgumentError(
                    f"{self.get_name()} was initialized without this variable "
                    f"{var.name!r}, with {sorted(self._values)}"
                )

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent in the exchange."""
        return 0.0 if self._reducer is None else self._reducer.waited

    def free(self) -> None:
        """Free what the exchange needs. Collective."""
        if self._freed:
            return
        if self._reducer is not None:
            self._reducer.free()
        if self._shard is not None:
            self._shard.free()
        super().free()
        release(self._sums)
        release(self._gradients)


def check_groups(groups: Any, size: int) -> list[list[int]]:
    """Return a group assignment, [] for none.

    Raises:
        InvalidArgumentError: If it is no list of lists of ranks, or the groups overlap,
            miss a rank, or differ in size.
    """
    if groups is None or (isinstance(groups, list) and not groups):
        return []
    if not isinstance(groups, list) or not all(isinstance(g, list) for g in groups):
        raise InvalidArgumentError(
            f"group_assignment must be a list of lists of ranks, got {groups!r}"
        )
    ranks = [rank for group in groups for rank in group]
    if not all(isinstance(rank, numbers.Integral) for rank in ranks):
        raise InvalidArgumentError(f"group_assignment must name ranks, got {groups!r}")
    if sorted(ranks) != list(range(size)):
        raise InvalidArgumentError(
            f"group_assignment must name each rank of 0 to {size - 1} once, "
            f"got {groups}"
        )
    if len({len(group) for group in groups}) != 1:
        raise InvalidArgumentError(
            f"groups of group_assignment must be of one size, got sizes "
            f"{[len(group) for group in groups]}"
        )
    return groups

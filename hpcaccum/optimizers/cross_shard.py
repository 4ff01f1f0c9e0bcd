"""CrossShardOptimizer: gradients summed or averaged over the ranks of a shard group."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import wire_format
from hpcaccum.device import release, to_host
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Exchange, Optimizer, scaled
from hpcaccum.optimizers.checks import (
    check_global_step,
    check_groups,
    check_pairs,
    check_variables,
    listed,
)
from hpcaccum.optimizers.reduction import Reduction, check_reduction
from hpcaccum.optimizers.shard import (
    Shard,
    check_wire_dtype,
    device_sums,
    layout_of,
)
from hpcaccum.optimizers.slices import exchanged, with_sums
from hpcaccum.optimizers.snapshot import counts_of, set_state, set_values
from hpcaccum.optimizers.start import broadcast, compare, signature, warn_of_wider
from hpcaccum.optimizers.wrapper import Wrapper, one_thread
from hpcaccum.reducer import check_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.accumulator import Tally
    from hpcaccum.optimizers.checks import Array, Loss, Pairs, PairsLike, Variables
    from hpcaccum.optimizers.finite import OnNonfinite
    from hpcaccum.optimizers.variable import Variable
    from hpcaccum.row_sums import Rows

# The options that reducers have, too.
_OF_REDUCERS = ("schedule", "cuda_aware", "wire_dtype")


class CrossShardOptimizer(Wrapper):
    """Sums gradients over the ranks of a shard group before the update. Collective.

    With `Reduction.MEAN`, `compute_gradients` divides the gradients by the size of the
    group and `apply_gradients` only sums. Code between the two calls, such as
    clipping, therefore sees gradients that are already divided. Every rank calls both,
    equally often.

    All ranks of a group start with the variables of the rank that the group's list
    names first: `initialize` broadcasts them, once. Variables may have different
    dtypes, but gradients are exchanged in the widest of them; a warning then lists the
    variables of that dtype.

    Of a variable with ``sparse=True``, only the rows of the gradients are exchanged:
    each rank gets those of all ranks, and the inner optimizer gets an `IndexedSlices`.
    An `IndexedSlices` of another variable becomes an array. A mean is that of whole
    gradients: rows that some ranks do not have are zero there.

    Args:
        opt: Makes the updates, the same on every rank of a group.
        reduction: ``Reduction.MEAN`` or ``Reduction.SUM``.
        name: Name for messages.
        group_assignment: Lists of ranks, one list a group. Together they contain each
            rank once, and all have the same length. None: one group of all ranks.
        comm: Communicator of the ranks; COMM_WORLD by default.
        schedule: See `Reducer`; "nccl" needs variables on a device.
        cuda_aware: Whether to pass device memory to MPI, by schedule "flat".
        wire_dtype: A narrower dtype, such as ``"bfloat16"``, in which sums of gradients
            travel between nodes; see `Reducer`. Rows travel in their own dtype.
        sync: Whether to broadcast. If False, `initialize` compares checksums of the
            variables and raises unless they are the same on all ranks of a group.
        on_nonfinite: What happens to gradients with a NaN or an infinity: "accept"
            reduces them, "drop" makes the update with those of the other ranks (a mean
            is over these), "raise" raises InvalidArgumentError on all ranks.

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
        schedule: str = "auto",
        cuda_aware: bool = False,
        wire_dtype: Any = None,
        sync: bool = True,
        on_nonfinite: OnNonfinite = "accept",
    ) -> None:
        whole = Group.of(comm)

        def check() -> dict[str, Any]:
            used = "flat" if cuda_aware and schedule == "auto" else schedule
            check_schedule(used, wire_dtype, cuda_aware)
            return {
                "optimizer": type(opt).__name__,
                "reduction": check_reduction(reduction),
                "schedule": used,
                "cuda_aware": bool(cuda_aware),
                "wire_dtype": check_wire_dtype(wire_dtype),
                "group_assignment": check_groups(group_assignment, whole.size),
                "sync": bool(sync),
            }

        super().__init__(opt, name, whole, check, on_nonfinite)
        groups = self._options["group_assignment"]
        self._split = whole.split(groups) if groups else None
        self._group = self._split or whole
        # The ranks of the group as the user numbers them.
        ranks = groups or [list(range(whole.size))]
        self._ranks = next(each for each in ranks if whole.rank in each)
        self._shard: Shard | None = None
        # Results for variables on a device.
        self._sums: dict[str, Array] = {}
        # Calls of compute_gradients, and the number of ranks at the last one.
        self._computed, self._parts = 0, self._group.size

    def initialize(self, var_list: Variables | None) -> None:
        """Set a group's variables to those of its first rank. Collective.

        The first `compute_gradients` or `apply_gradients` calls it if the user does
        not. A second call has no effect.

        Raises:
            TypeError, InvalidArgumentError: On every rank, if ``var_list`` does not
                contain variables, or a variable has integers.
            DisagreementError: On every rank of a group, if the variables differ in
                name, shape or dtype; with ``sync=False`` also if they differ in value.
        """
        self._prepare(var_list, None)

    def _prepare(self, var_list: Variables | None, error: Exception | None) -> None:
        """Initialize, or raise the error of one rank on every rank. Collective."""
        self._check_open()
        if self._shard is not None:
            self._shard.check_present()
            if error is not None:
                self._shard.fail(error)
            return

        def check() -> tuple[list[Variable], dict[str, Array]]:
            if error is not None:
                raise error
            variables = self._check_start(var_list)
            wire_format(self._options["wire_dtype"], layout_of(variables).dtype)
            return variables, device_sums(variables)

        what = f"{self.get_name()}: initialize"
        variables, self._sums = self._group.agree(
            what,
            check,
            lambda checked: {
                "optimizer": self.inner,
                "variables": signature(checked[0]),
                "sparse": [var.name for var in checked[0] if var.sparse],
            },
        )
        if self._options["sync"]:
            broadcast(self._group, variables, what)
        else:
            compare(self._group, variables, self._ranks, what)
        if self._ranks[self._group.rank] == 0:
            dense = [var for var in variables if not var.sparse]
            warn_of_wider(self.get_name(), dense)
        self._start(variables)
        self.inner.initialize(variables)
        self._shard = Shard(
            self._group,
            layout_of(variables),
            self.get_name(),
            {each: self._options[each] for each in _OF_REDUCERS},
        )

    @one_thread
    def gradient_arrays(self) -> dict[str, Array]:
        """Return the arrays that gradients are exchanged in, by name.

        `minimize` does not copy what the loss writes to them, and may write to them.
        They have the dtype in which gradients are summed, and are the same until a rank
        leaves. For variables on a device they are device memory, which is copied.
        """
        if self._shard is None or self._sums:
            return super().gradient_arrays()
        arrays = self._shard.reducer.arrays()
        sparse = {var.name for var in check_variables(self._variables) if var.sparse}
        return {name: array for name, array in arrays.items() if name not in sparse}

    def _halves(self) -> tuple[Callable[..., Pairs], Callable[..., Receipt | None]]:
        # Nothing sees the gradients between the two calls of minimize, so the reduction
        # can divide them, which saves a pass over memory; unless a call is overridden.
        if not self._divides or self._overrides():
            return super()._halves()
        return self._compute, functools.partial(self._apply, parts=None)

    @property
    def _divides(self) -> bool:
        """Whether `compute_gradients` divides."""
        return self._options["reduction"] == Reduction.MEAN and self._parts > 1

    def _overrides(self) -> bool:
        """Whether a subclass, or this instance, replaces one of the two calls."""
        calls = self.compute_gradients, self.apply_gradients
        own = CrossShardOptimizer.compute_gradients, CrossShardOptimizer.apply_gradients
        return tuple(getattr(call, "__func__", None) for call in calls) != own

    @one_thread
    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Compute the gradients of this rank's share of the loss.

        A mean divides them here, and copies them for that; `minimize` needs no copy.

        Raises:
            InvalidArgumentError, TypeError: On every rank of the group, if the loss of
                one rank does not return gradients of its variables.
        """
        pairs = self._compute(loss, var_list, *args, **kwargs)
        if not self._divides:
            return pairs
        # Not in place: another gradient may lie in the same memory.
        scale = 1 / self._parts
        return [
            (None if grad is None else scaled(grad, scale), var) for grad, var in pairs
        ]

    def _compute(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Compute the gradients, not yet divided by the size of the group."""
        variables = self._variables if var_list is None else listed(var_list)
        self.initialize(variables)
        self._parts = len(self._made(self._shard).present)
        # First: a rank whose loss raises, and that goes on, is a call ahead.
        self._computed += 1
        try:
            return self.inner.compute_gradients(loss, variables, *args, **kwargs)
        except (TypeError, InvalidArgumentError) as error:
            # The other ranks wait for this one in their `apply_gradients`.
            self._prepare(variables, error)
            raise

    @one_thread
    def apply_gradients(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> Receipt:
        """Sum the gradients over the group, then let the inner optimizer update.

        Args:
            grads_and_vars: Pairs; a gradient of None must be None on all ranks.
            global_step: Passed to the inner optimizer.
            name: Ignored.

        Returns:
            Accepted, unless they are not finite and were dropped. Both steps are the
            number of earlier updates.

        Raises:
            InvalidArgumentError, TypeError: On every rank of the group, if the pairs of
                one rank are wrong; no variable is changed. On this rank, if it has
                left.
            DisagreementError: On every rank of the group, before any update, if a
                gradient is None on some ranks only, or if ranks have called
                `compute_gradients` a different number of times.
        """
        parts = self._parts if self._divides else 0
        return self._apply(grads_and_vars, global_step, name, parts=parts)

    def _apply(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None,
        name: str | None,
        *,
        parts: int | None,
    ) -> Receipt:
        pairs: Pairs = []
        grads: dict[str, Array | Rows] = {}
        problem: Exception | None = None
        skips = False
        try:
            pairs = check_pairs(grads_and_vars)
            check_global_step(global_step)
            if self._shard is not None:
                self._check_known(var for _, var in pairs)
            skips = self._drops(pairs)
            grads = exchanged(pairs)
        except (TypeError, InvalidArgumentError) as error:
            problem = error
        self._prepare([var for _, var in pairs], problem)
        shard = self._made(self._shard)
        receipt = Receipt(not skips, shard.step, shard.step, nonfinite=skips)
        sums = shard.reduce(
            grads,
            {name: self._sums[name] for name in grads} if self._sums else None,
            # Ranks that discard a different number of gradients are out of step.
            self._computed,
            parts,
            skips=skips,
        )
        if sums is None:
            return receipt
        shard.count()
        summed = with_sums(pairs, sums)
        self.inner.apply_gradients(summed, global_step, name)
        return receipt

    @property
    def global_step(self) -> int:
        """Number of updates so far; after `free`, in total."""
        return self._made(self._shard).step

    def statistics(self) -> Tally:
        """Return how many gradients of each rank of the group were part of an update.

        Ranks are numbered as in the group's list. A rank that has left knows the rest
        after `free`.
        """
        return self._made(self._shard).tally()

    def _reader(self) -> Callable[[Sequence[str]], list[Array]]:
        self._made(self._shard)
        return lambda names: [np.array(to_host(self._values[name])) for name in names]

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the variables and of their state. Not collective.

        Returns:
            As `Optimizer.snapshot`; and "global_step", the number of updates, and
            "tally", the `statistics` as lists.
        """
        return {**super().snapshot(), **self._made(self._shard).counts()}

    def leave(self) -> None:
        """Declare that this rank contributes no more gradients.

        The others go on without it: a mean is that over the ranks that remain. This
        call waits until each of them applies gradients, or leaves, too. Then the rank
        goes on alone, until `free`. So ranks with different amounts of data each call
        this after their last gradient.

        Raises:
            InvalidArgumentError: Before `initialize`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; names the missing ranks.
            Exception: As `apply_gradients`, of another rank; this rank has not left.
        """
        self._check_open()
        self._made(self._shard).leave()

    def restore(self, snapshot: Any, var_list: Variables | None = None) -> None:
        """Initialize, and set a group's variables and state to a snapshot. Collective.

        Args:
            snapshot: On the first rank of each group; others may pass None.
            var_list: As for `Optimizer.restore`.

        Raises:
            TypeError, InvalidArgumentError, DisagreementError: On every rank, if the
                snapshot does not fit, or variables differ.
        """
        self._check_open()
        what, first = f"{self.get_name()}: restore", self._group.rank == 0

        def check() -> tuple[list[Variable], Mapping[str, Any]]:
            variables = self._snapshot_variables(listed(var_list))
            if self._shard is not None:
                self._shard.check_present()
                self._check_known(variables)
            if not first:
                return variables, {}
            self._check_snapshot(snapshot, variables)
            return variables, counts_of(snapshot)

        variables, counts = self._group.agree(
            what, check, lambda checked: {"variables": signature(checked[0])}
        )
        if first:
            set_values(variables, snapshot)
        # Also of an optimizer that is initialized, or was made with sync=False.
        broadcast(self._group, variables, what)
        self.initialize(variables)
        self._share_state(variables, snapshot, what)
        self._made(self._shard).begin(**self._group.allgather(counts, what)[0])
        self._computed = 0

    def _share_state(self, variables: list[Variable], snapshot: Any, what: str) -> None:
        """Set the state on all ranks of a group to that of the first. Collective."""
        kept = self._kept_state(variables)

        def fill() -> dict[str, object]:
            if self._group.rank == 0:
                set_state(kept, snapshot["state"], self.get_name())
            return {}

        self._group.agree(what, fill)
        broadcast(self._group, kept.values(), what)
        self._state_changed(variables)

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent in the exchange."""
        return 0.0 if self._shard is None else self._shard.waited

    def free(self) -> None:
        """Free it. Collective, of all ranks of a group, also of those that have left.

        If ranks have left, their variables are set to those of the last update.
        `center`, `global_step` and `statistics` remain available.
        """
        super().free()

    def _free(self) -> None:
        if self._shard is not None:
            newest = self._shard.finish()
            if newest is not None:
                variables = check_variables(self._variables)
                broadcast(self._group, variables, f"{self.get_name()}: free", newest)
        if self._split is not None:
            self._split.free()
        release(self._sums)
        super()._free()

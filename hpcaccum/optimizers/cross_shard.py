"""CrossShardOptimizer: gradients summed or averaged over the ranks of a shard group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import check_wire_dtype, wire_format
from hpcaccum.device import cupy, is_device, release
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group, Objects, group_of
from hpcaccum.optimizers.base import ExchangeKind, Optimizer, with_factor
from hpcaccum.optimizers.checks import (
    Loss,
    Pairs,
    PairsLike,
    Variables,
    check_groups,
    check_pairs,
    check_variables,
    exchanged_weight,
    listed,
)
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.shard_reducer import ShardReducer, layout_of, row_formats
from hpcaccum.optimizers.slices import exchanged, with_sums
from hpcaccum.optimizers.snapshot import set_values
from hpcaccum.optimizers.start import broadcast, compare, signature, warn_of_wider
from hpcaccum.optimizers.update_rule import finite
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import Wrapper, one_thread
from hpcaccum.reducer import RAISE, check_schedule

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

# The options that reducers have, too.
_OF_REDUCERS = ("schedule", "cuda_aware", "wire_dtype", "on_loss")


class Reduction:
    """How the gradients of all ranks are combined; the values are TensorFlow's."""

    MEAN = "weighted_mean"
    SUM = "weighted_sum"


class CrossShardOptimizer(Wrapper):
    """Sums gradients over the ranks of a shard group before the update. Collective.

    With `Reduction.MEAN`, `compute_gradients` divides the gradients by the size of the
    group and `apply_gradients` only sums them. Code between the two calls, such as
    clipping, therefore sees gradients that are already divided. (If ranks pass weights,
    `apply_gradients` replaces this division by that by the sum of the weights.) Every
    rank calls both the same number of times.

    All ranks of a group start with the variables of the rank that the group's list
    names first: `initialize` broadcasts them, once. Variables may have different
    dtypes, but gradients are exchanged in the widest of them; a warning then lists the
    variables of that dtype.

    For a variable with ``sparse=True``, only the rows of the gradients are exchanged,
    and the inner optimizer gets an `IndexedSlices`. In a mean, rows that a rank does
    not have count as zero. For any other variable, an `IndexedSlices` is converted to
    an array.

    Args:
        opt: Makes the updates, the same on every rank of a group.
        reduction: ``Reduction.MEAN`` or ``Reduction.SUM``.
        name: Name for messages.
        group_assignment: Lists of ranks, one list per group. Together they contain each
            rank once, and all have the same length. None: one group of all ranks.
        comm: Communicator of the ranks; COMM_WORLD by default.
        schedule: See `Reducer`; "nccl" needs variables on a device.
        cuda_aware: Whether to pass device memory to MPI, by schedule "flat".
        wire_dtype: A narrower dtype, such as ``"bfloat16"``, in which sums of gradients
            are sent between nodes; see `Reducer`. Rows are sent in their own dtype.
        sync: Whether to broadcast. If False, `initialize` compares checksums of the
            variables and raises unless they are the same on all ranks of a group.
        on_nonfinite: What happens to gradients with a NaN or an infinity: "accept"
            reduces them, "drop" makes the update with those of the other ranks (a mean
            is over these), "raise" raises InvalidArgumentError on all ranks.
        on_loss: What happens when a rank is lost: "raise" has all others end with a
            LostRankError. With "shrink" the others of its group go on, if the process
            of the rank has ended, and it is not the first of its group or of ``comm``.
            A mean is then that over the ranks that remain. See `Reducer` for when the
            last gradient counts. `leave` and `restore` raise LostRankError from then
            on. Requires all ranks on one node, variables in CPU memory that are not
            sparse, and schedule "auto" or "shared".

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.

    Source: the behavior of ``tf.compat.v1.tpu.CrossShardOptimizer``.
    """

    exchange = ExchangeKind.COLLECTIVE

    _shard: ShardReducer | None = None
    # The communicator of the group, if it is not all ranks.
    _split: Group | None = None

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
        on_loss: str = RAISE,
    ) -> None:
        whole = group_of(comm)

        def check() -> dict[str, Any]:
            used = "flat" if cuda_aware and schedule == "auto" else schedule
            used = check_schedule(used, wire_dtype, cuda_aware, on_loss, whole)
            if reduction not in (Reduction.MEAN, Reduction.SUM):
                raise InvalidArgumentError(
                    f"reduction must be Reduction.MEAN or Reduction.SUM, got "
                    f"{reduction!r}"
                )
            return {
                "optimizer": type(opt).__name__,
                "reduction": reduction,
                "schedule": used,
                "cuda_aware": bool(cuda_aware),
                "wire_dtype": check_wire_dtype(wire_dtype),
                "group_assignment": check_groups(group_assignment, whole.size),
                "sync": bool(sync),
                "on_loss": on_loss,
            }

        super().__init__(opt, name, whole, check, on_nonfinite)
        groups = self._options["group_assignment"]
        self._split = whole.split(groups) if groups else None
        self._group = self._split or whole
        # The ranks of the group as the user numbers them.
        ranks = groups or [list(range(whole.size))]
        self._ranks = next(each for each in ranks if whole.rank in each)
        # Results for variables on a device.
        self._sums: dict[str, Array] = {}
        # The number of ranks at the last call of compute_gradients.
        self._parts = self._group.size

    def initialize(self, var_list: Variables | None) -> None:
        """Set a group's variables to those of its first rank. Collective.

        The first `compute_gradients` or `apply_gradients` calls it if the user does
        not. A second call has no effect, and must not pass other variables.

        Raises:
            TypeError, InvalidArgumentError: On every rank, if ``var_list`` does not
                contain variables, or a variable has integers.
            DisagreementError: On every rank of a group, if the variables differ in
                name, shape or dtype; with ``sync=False`` also if they differ in value.
        """
        self._check_open()
        if self._shard is not None:
            self._shard.check_present()
            if var_list is not None:
                self._check_known(check_variables(var_list))
            return

        def check() -> tuple[Any, ...]:
            variables = self._check_start(var_list)
            layout = layout_of(variables, self._group.size)
            rows = row_formats(variables)
            wire_format(self._options["wire_dtype"], layout.dtype)
            sums: dict[str, Array] = {}
            if is_device(variables[0].value):
                sums = layout.views(cupy().zeros(layout.size, layout.dtype))
            if self._options["on_loss"] != RAISE and (sums or rows):
                raise InvalidArgumentError(
                    f"{self.get_name()}: on_loss={self._options['on_loss']!r} is not "
                    f"for variables that are on a device, or sparse"
                )
            return variables, rows, layout, sums

        what = self._call("initialize")
        variables, rows, layout, self._sums = self._group.agree(
            what,
            check,
            lambda checked: {
                "optimizer": self.inner,
                "variables": signature(checked[0]),
                "sparse": list(checked[1]),
                "number of broadcasts": self._group.broadcasts,
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
        self._shard = ShardReducer(
            self._group,
            layout,
            self.get_name(),
            {each: self._options[each] for each in _OF_REDUCERS},
            rows,
        )

    def _ensure_initialized(self, var_list: Variables | None) -> ShardReducer:
        """Initialize at the first call; return the reducer."""
        # Other variables later are an error of the exchange, on all ranks.
        self.initialize(var_list if self._shard is None else None)
        return self._any_shard()

    def _check_start(self, var_list: Variables | None) -> list[Variable]:
        if self._shard is not None:
            self._shard.check_present()
        return super()._check_start(var_list)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise an error on every rank, while the others exchange. Collective."""
        self._check_open()
        if self._shard is not None:
            self._shard.fail(error)
        # They are in `initialize`.
        self._group.raise_together(self._call("initialize"), error)
        raise error

    @one_thread
    def gradient_arrays(self) -> dict[str, Array]:
        """Return the arrays that gradients are exchanged in, by name.

        `minimize` does not copy what the loss writes to these arrays, and may write to
        them. They have the dtype in which gradients are summed, and are the same until
        a rank leaves, or until `restore` after an exception. For variables on a device
        they are device memory, which is copied.

        Raises:
            InvalidArgumentError: Before `initialize`.
        """
        self._check_open()
        if self._shard is None or self._sums:
            return super().gradient_arrays()
        arrays = self._shard.reducer.arrays()
        sparse = {var.name for var in check_variables(self._variables) if var.sparse}
        return {name: array for name, array in arrays.items() if name not in sparse}

    @property
    def _divides(self) -> bool:
        """Whether `compute_gradients` divides."""
        return self._options["reduction"] == Reduction.MEAN and self._parts > 1

    def _is_whole_step(self) -> bool:
        """Whether `minimize` is running, with the two calls of this class."""
        # Nothing sees the gradients between the calls, so the reduction can divide
        # them, which saves a pass over memory.
        calls = self.compute_gradients, self.apply_gradients
        own = CrossShardOptimizer.compute_gradients, CrossShardOptimizer.apply_gradients
        found = tuple(getattr(call, "__func__", None) for call in calls)
        return self._in_minimize and found == own

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
        variables = self._variables if var_list is None else listed(var_list)
        shard = self._ensure_initialized(variables)
        # Other ranks may still read what the loss writes to.
        shard.check_usable()
        self._parts = len(shard.present)
        # Before the loss: a rank whose loss raises, and that goes on, is a call ahead.
        # If only calls that succeed were counted, the others would learn of it at the
        # end, when they wait for a call that this rank never makes.
        shard.computed += 1
        whole, inside = self._is_whole_step(), self._in_minimize
        # The loss may compute other gradients, which are not those of `minimize`.
        self._in_minimize = False
        try:
            pairs = self.inner.compute_gradients(loss, variables, *args, **kwargs)
        except (TypeError, InvalidArgumentError) as error:
            # The other ranks wait for this one in their `apply_gradients`.
            self._fail(error)
        finally:
            self._in_minimize = inside
        if not self._divides or whole:
            return pairs
        # Not in place: another gradient may lie in the same memory.
        return with_factor(pairs, 1 / self._parts)

    @one_thread
    def apply_gradients(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Sum the gradients over the group, then let the inner optimizer update.

        Args:
            grads_and_vars: Pairs; a gradient of None must be None on all ranks.
            global_step: Passed to the inner optimizer. At the end, `free` sets it on
                all ranks.
            name: Ignored.
            weight: What the gradients of this rank count, such as the number of samples
                in its batch: a mean is sum(weight * gradient) / sum(weight), a sum is
                sum(weight * gradient).

        Returns:
            Accepted, unless they are not finite and were dropped. Both steps are the
            number of earlier updates.

        Raises:
            InvalidArgumentError, TypeError: On every rank of the group, if the pairs of
                one rank are wrong, or its weight is not a finite number above 0; no
                variable is changed. On this rank, if it has left.
            DisagreementError: On every rank of the group, before any update, if a
                gradient is None on some ranks only, if the learning rate is not the
                same number on all ranks, or if ranks have called `compute_gradients` a
                different number of times. These calls are then counted from 0, so that
                all ranks can go on.
            BrokenObjectError: On this rank, if an exception, such as a timeout, has
                ended an earlier call after other ranks could use its gradients;
                `restore` on all ranks makes their variables the same again.
        """
        try:
            pairs = check_pairs(grads_and_vars)
            self._checked_step(global_step)
            if self._shard is not None:
                self._check_known([var for _, var in pairs])
            grads, skips = exchanged(pairs), self._drops(pairs)
            weight = exchanged_weight(weight)
        except (TypeError, InvalidArgumentError) as error:
            self._fail(error)
        shard = self._ensure_initialized([var for _, var in pairs])
        receipt = Receipt(not skips, shard.step, shard.step, nonfinite=skips)
        shard.rates = [finite(getattr(self.inner, "learning_rate", None))]
        out = {name: self._sums[name] for name in grads} if self._sums else None
        parts: int | None = self._parts
        if self._options["reduction"] != Reduction.MEAN:
            parts = 0
        elif self._divides and self._is_whole_step():
            parts = None
        sums = shard.reduce(grads, out, parts, skips=skips, weight=weight)
        if sums is None:
            return receipt
        shard.count()
        self.inner.apply_gradients(with_sums(pairs, sums), global_step, name)
        shard.updated()
        return receipt

    # Questions, snapshots, and the end

    def _any_shard(self) -> ShardReducer:
        """Return the reducer; a freed one still answers questions."""
        return self._initialized(self._shard)

    @property
    def _exchanges(self) -> Sequence[ShardReducer]:
        return [] if self._shard is None else [self._shard]

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the variables and of their state. Not collective.

        Returns:
            As `Optimizer.snapshot`; and "global_step", the number of updates, and
            "tally", the `statistics` as lists.
        """
        return {**super().snapshot(), **self._any_shard().counts()}

    def restore(self, snapshot: Any, var_list: Variables | None = None) -> None:
        """Initialize, and set a group's variables and state to a snapshot. Collective.

        If an exception, such as a timeout, has ended a call of a rank, its later calls
        are errors. After this call they work again. If an exception ends `restore`
        itself, only an optimizer on another communicator may work.

        Args:
            snapshot: On the first rank of each group; others may pass None.
            var_list: As for `Optimizer.restore`.

        Raises:
            TypeError, InvalidArgumentError, DisagreementError: On every rank, if the
                snapshot does not fit, or variables differ.
        """
        what, first = self._call("restore"), self._group.rank == 0
        variables, counts = self._agree_on_snapshot(
            snapshot,
            var_list,
            first,
            lambda variables: {
                "variables": signature(variables),
                "number of broadcasts": self._group.broadcasts,
            },
        )
        if first:
            set_values(variables, snapshot)
        # Also of an optimizer that is initialized, or was made with sync=False.
        broadcast(self._group, variables, what)
        self.initialize(variables)
        state = self._kept_state(variables)
        self._group.agree(
            what, lambda: state.set(snapshot["state"]) if first else None, lambda _: {}
        )
        broadcast(self._group, state.parts().values(), what)
        shard = self._any_shard()
        shard.renew(what)
        shard.begin(**counts[0])
        self._begin_at(shard.step)

    @one_thread
    def assign(self) -> None:
        """Set a group's variables to those of its first rank. Collective.

        All ranks of the group call it, including those that have left, after the first
        rank has changed the values of its variables. The state and the counts do not
        change. If all ranks set the same values, no call is needed.

        Raises:
            InvalidArgumentError: Before `initialize`.
        """
        self._check_open()
        self._any_shard()
        what, first = self._call("assign"), self._group.rank == 0
        self._group.agree(what, lambda: self.before_assign(first), lambda _: {})
        broadcast(self._group, check_variables(self._variables), what)

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
        self._any_shard().leave()

    def _free(self) -> None:
        if self._shard is not None:
            newest = self._shard.finish()
            if newest is not None:
                variables = check_variables(self._variables)
                broadcast(self._group, variables, self._call("free"), newest)
            call = self._call("global step")
            found = self._group.gather_present(tuple(self._steps), call)
            self._end_steps([*found.values()])
        if self._split is not None:
            Objects.of(self._split).close()
        release(self._sums)
        super()._free()

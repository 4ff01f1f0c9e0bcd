"""Counts, snapshots and the end of an optimizer that reduces gradients in a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import release, to_host
from hpcaccum.optimizers.checks import check_variables, listed
from hpcaccum.optimizers.snapshot import counts_of, set_state, set_values
from hpcaccum.optimizers.start import broadcast, signature
from hpcaccum.optimizers.wrapper import Wrapper, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum.accumulator import Tally
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.optimizers.checks import Variables
    from hpcaccum.optimizers.shard_reducer import ShardReducer
    from hpcaccum.optimizers.variable import Variable


class ReducingOptimizer(Wrapper):
    """Holds the reducer of a group, which `initialize` of a subclass makes. Collective.

    The group is all ranks, or a shard group of the user.
    """

    _shard: ShardReducer | None = None
    # The communicator of the group, if it is not all ranks.
    _split: Group | None = None
    # Results for variables on a device.
    _sums: dict[str, Array]

    def _any_shard(self) -> ShardReducer:
        """Return the reducer; a freed one still answers questions."""
        return self._initialized(self._shard)

    @property
    def global_step(self) -> int:
        """Number of updates so far; after `free`, in total."""
        return self._any_shard().step

    def statistics(self) -> Tally:
        """Return how many gradients of each rank of the group were part of an update.

        Ranks are numbered as in the group's list. A rank that has left knows the rest
        after `free`.
        """
        return self._any_shard().tally()

    def _reader(self) -> Callable[[Sequence[str]], list[Array]]:
        self._any_shard()
        return lambda names: [np.array(to_host(self._values[name])) for name in names]

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
        self._check_open()
        what, first = self._call("restore"), self._group.rank == 0

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
            what,
            check,
            lambda checked: {
                "variables": signature(checked[0]),
                "number of broadcasts": self._group.broadcasts,
            },
        )
        if first:
            set_values(variables, snapshot)
        # Also of an optimizer that is initialized, or was made with sync=False.
        broadcast(self._group, variables, what)
        self.initialize(variables)
        self._share_state(variables, snapshot, what)
        shard = self._any_shard()
        shard.renew(what)
        shard.begin(**self._group.allgather(counts, what)[0])
        self._begin_at(shard.step)

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
        self._group.agree(what, lambda: self.inner._take_values(first), lambda _: {})
        broadcast(self._group, check_variables(self._variables), what)

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent in the exchange."""
        return 0.0 if self._shard is None else self._shard.waited

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

    def free(self) -> None:
        """Free it. Collective, of all ranks of a group, also of those that have left.

        If ranks have left, their variables are set to those of the last update. A
        Variable that one rank passed as ``global_step`` is `global_step` on all ranks;
        one that did not pass it is found by its name.
        `center`, `global_step` and `statistics` remain available.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, on all ranks that wait;
                names the missing ranks. Another call on all ranks does the rest.
        """
        super().free()

    def _free(self) -> None:
        if self._shard is not None:
            newest = self._shard.finish()
            if newest is not None:
                variables = check_variables(self._variables)
                broadcast(self._group, variables, self._call("free"), newest)
            names = tuple(self._steps)
            self._end_steps(self._group.allgather(names, self._call("global step")))
        if self._split is not None:
            self._split.free()
        release(self._sums)
        super()._free()

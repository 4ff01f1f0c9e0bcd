"""The base class of optimizers that wrap another one."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, SupportsFloat, TypeVar, cast, overload

import numpy as np

from hpcaccum import metrics
from hpcaccum.accumulator import Receipt, Tally
from hpcaccum.arguments import positive_count
from hpcaccum.device import all_on_device, release, to_host
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError, counted
from hpcaccum.mpi import Freeable, Group
from hpcaccum.optimizers.base import ExchangeKind, KeptState, Optimizer
from hpcaccum.optimizers.checks import (
    Loss,
    Pairs,
    Variables,
    check_global_step,
    check_trainable,
    check_variables,
    listed,
)
from hpcaccum.optimizers.finite import OnNonfinite, check_choice, to_drop
from hpcaccum.optimizers.shard_reducer import ShardReducer
from hpcaccum.optimizers.snapshot import counts_of
from hpcaccum.optimizers.update_rule import Rate
from hpcaccum.optimizers.variable import Variable, check_name, counter
from hpcaccum.server import ParameterServer

logger = logging.getLogger("hpcaccum")

# Gradients that are dropped one after the other before a warning.
_MANY = 20

T = TypeVar("T")
P = ParamSpec("P")
W = TypeVar("W", bound="Wrapper")


def one_thread(
    call: Callable[Concatenate[W, P], T],
) -> Callable[Concatenate[W, P], T]:
    """Make a method raise while another thread is in such a method of the object."""
    # Two threads would use the same memory for their gradients.

    @functools.wraps(call)
    def run(self: W, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._in_call.acquire(blocking=False):
            raise InvalidArgumentError(
                f"{self.get_name()}: {call.__name__} was called while another thread "
                f"of this rank used the optimizer: only one at a time may"
            )
        try:
            return call(self, *args, **kwargs)
        finally:
            self._in_call.release()

    return run


class Wrapper(Freeable, Optimizer):
    """Exchanges gradients and delegates the updates to another optimizer. Collective.

    ``check`` checks the options of this rank, and returns those that must be the same
    on all ranks, by name.

    Attributes:
        inner: Makes the updates; its state is shown as this optimizer's.
        before_assign: Called by `assign` with whether the values of this rank are
            assigned to all. An adapter brings them to the variables; it may raise.
    """

    # Whether `minimize` is running.
    _in_minimize = False

    def __init__(
        self,
        inner: Optimizer,
        name: str,
        group: Group,
        check: Callable[[], Mapping[str, Any]],
        on_nonfinite: OnNonfinite,
    ) -> None:
        def check_all() -> Mapping[str, Any]:
            check_name(name)
            check_inner(inner, self)
            return {**check(), "on_nonfinite": check_choice(on_nonfinite)}

        # What all ranks agreed on, by name.
        self._options = group.agree(type(self).__name__, check_all)
        super().__init__(name)
        self.inner, self._group = inner, group
        self.before_assign: Callable[[bool], None] = lambda _: None
        # Held during calls of `one_thread`, which call each other.
        self._in_call = threading.RLock()
        # Arrays of the variables, by name; empty before `initialize`.
        self._values: dict[str, Array] = {}
        self._known: frozenset[Variable] = frozenset()
        self._begin_at(0)
        # Gradients of this rank that were dropped one after the other.
        self._dropped, self._warned = 0, False
        # What was passed as ``global_step``, by name.
        self._steps: dict[str, Variable] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, name={self.get_name()!r})"

    @property
    def learning_rate(self) -> Rate:
        """The learning rate of the inner optimizer; may be set.

        With a one-sided optimizer, set it on the host, which updates the center; on
        other ranks it affects only local steps. With a collective optimizer, set it to
        the same value on all ranks of a group: different numbers raise an error at its
        next update, but results of callables are not compared.

        Raises:
            AttributeError: If the inner optimizer has none.
        """
        rate: Rate = self.inner.learning_rate  # type: ignore[attr-defined]
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: Rate) -> None:
        # Read it first: a user's optimizer would accept any attribute.
        _ = self.learning_rate
        self.inner.learning_rate = rate  # type: ignore[attr-defined]

    @one_thread
    def minimize(
        self,
        loss: Loss,
        global_step: Variable | None = None,
        var_list: Variables | None = None,
        gate_gradients: int = Optimizer.GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: SupportsFloat | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Compute gradients and apply them; see `Optimizer.minimize`.

        ``weight`` is that of `apply_gradients`.

        Returns:
            The receipt of `apply_gradients`, with the value of ``loss``.
        """
        self._in_minimize = True
        try:
            receipt = super().minimize(
                loss,
                global_step,
                var_list,
                gate_gradients,
                aggregation_method,
                colocate_gradients_with_ops,
                name,
                grad_loss,
                weight=weight,
            )
        finally:
            self._in_minimize = False
        return cast("Receipt", receipt)

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot of the inner optimizer."""
        return self.inner.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the slot names of the inner optimizer."""
        return self.inner.get_slot_names()

    def variables(self) -> list[Variable]:
        """Return the state variables of the inner optimizer."""
        return self.inner.variables()

    def _check_start(self, var_list: Variables | None) -> list[Variable]:
        """Return the variables that an optimizer can be initialized with."""
        variables = check_variables(var_list)
        check_trainable(variables)
        all_on_device("variables", [var.value for var in variables])
        return variables

    def _agree_on_snapshot(
        self,
        snapshot: Any,
        var_list: Variables | None,
        is_root: bool,
        facts: Callable[[list[Variable]], Mapping[str, Any]],
    ) -> tuple[list[Variable], list[dict[str, Any]]]:
        """Return variables that the root's snapshot fits, and each rank's counts.

        Collective. The counts of the root are those of the snapshot. ``facts`` returns
        what must be the same of the variables of all ranks.
        """
        self._check_open()
        what = self._call("restore")

        def check() -> tuple[list[Variable], dict[str, Any]]:
            wanted = self._variables if var_list is None else listed(var_list)
            variables = self._check_start(wanted)
            if self._values:
                self._check_known(variables)
            if not is_root:
                return variables, {}
            self._check_snapshot(snapshot, variables)
            return variables, counts_of(snapshot)

        variables, counts = self._group.agree(
            what, check, lambda checked: facts(checked[0])
        )
        return variables, self._group.allgather(counts, what)

    def _check_snapshot(self, snapshot: Any, variables: list[Variable]) -> None:
        """Raise unless variables, and the state of these, can be set to a snapshot."""
        self._kept_state(variables).check(snapshot)

    def _start(self, variables: list[Variable]) -> None:
        Optimizer.initialize(self, variables)
        self._values = {var.name: var.value for var in variables}
        self._known = frozenset(variables)

    def _check_known(self, variables: Sequence[Variable]) -> None:
        """Raise InvalidArgumentError unless it was initialized with these variables."""
        # Others may have the same arrays.
        for var in () if self._known.issuperset(variables) else variables:
            if self._values.get(var.name) is not var.value:
                raise InvalidArgumentError(
                    f"{self.get_name()}: the optimizer was initialized without this "
                    f"variable {var.name!r}; it has {sorted(self._values)}"
                )

    def _checked_step(self, global_step: Any) -> Variable | None:
        """Return a global step, or None, as `check_global_step`."""
        checked = check_global_step(global_step)
        if checked is not None:
            self._steps[checked.name] = checked
        return checked

    def _end_steps(self, found: Sequence[Sequence[str]]) -> None:
        """Set each global step to the number of updates."""
        # Some ranks do not pass theirs: those that only serve, or leave before their
        # first gradient.
        for name in {name for names in found for name in names}:
            if (step := self._steps.get(name) or counter(name)) is not None:
                step.value[...] = self.global_step

    @property
    def _exchanges(self) -> Sequence[ParameterServer | ShardReducer]:
        """What exchanges the gradients; nothing before `initialize`."""
        raise NotImplementedError

    @property
    def global_step(self) -> int:
        """Number of updates so far; after `free`, in total."""
        return sum(each.step for each in self._initialized(self._exchanges or None))

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for others, or spent in reductions."""
        return float(sum(each.waited for each in self._exchanges))

    def statistics(self) -> Tally:
        """Return how many gradients of each rank were accepted and dropped so far.

        Those of a collective optimizer count what was part of an update, and number the
        ranks as in their group's list; a rank that has left knows the rest after
        `free`.
        """
        first, *others = self._initialized(self._exchanges or None)
        return sum((each.tally() for each in others), first.tally())

    def _begin_at(self, step: int) -> None:
        """Set the step with which the training begins, for `every`."""
        # By n, the largest multiple of n for which `every` has returned True, over n.
        self._first_step, self._passed = step, dict[int, int]()

    def every(self, n: int) -> bool:
        """Return whether training has reached a multiple of n. Not collective.

        True if `global_step` has reached or passed a multiple of ``n`` since the last
        call with this ``n`` on this rank that returned True; before the first such
        call, since the step of `initialize` or `restore`. Passing several multiples
        gives True once. So ``if rank == 0 and opt.every(100):`` saves or prints once
        every 100 updates, while ``global_step % 100 == 0`` misses those at which this
        rank makes no update. Two conditions in a loop need different ``n``, or must
        share the result of one call.

        With a collective optimizer, it is the same on all ranks of a group that make
        the same calls.

        Args:
            n: Number of updates, at least 1.

        Raises:
            TypeError, InvalidArgumentError: If ``n`` is not such a number, or before
                `initialize`.
        """
        n = positive_count(n, "n")
        passed = self.global_step // n
        if passed <= self._passed.get(n, self._first_step // n):
            return False
        self._passed[n] = passed
        return True

    def _drops(self, pairs: Pairs) -> bool:
        """Return whether to drop gradients, because they are not finite."""
        grads = ((var.name, grad, var.dtype) for grad, var in pairs)
        return to_drop(self.get_name(), grads, self._options["on_nonfinite"])

    def _metrics(self) -> metrics.Metrics:
        facts = self.global_step, self.waited, self.statistics()
        return metrics.Metrics(self.get_name(), *facts)

    def _note(self, receipt: Receipt) -> None:
        """Count a gradient; warn, once, if the last ones were all dropped."""
        metrics.note(self)
        self._dropped = 0 if receipt.accepted else self._dropped + 1
        if self._dropped < _MANY or self._warned:
            return
        self._warned = True
        late = f"was {counted(receipt.lag, 'update')} late, and {self._bound()}"
        logger.warning(
            "%s: the last %d gradients of rank %d were all dropped, so the data of "
            "this rank are not in the model; the last gradient %s",
            self.get_name(),
            _MANY,
            self._group.rank,
            "was not finite" if receipt.nonfinite else late,
        )

    def _bound(self) -> str:
        """Return which gradients are accepted."""
        raise NotImplementedError

    def _call(self, name: str) -> str:
        """Return what messages call a collective call of this optimizer."""
        return f"{self.get_name()}: {name}"

    def _initialized(self, part: T | None) -> T:
        """Return what `initialize` makes; raise InvalidArgumentError before that."""
        if part is None:
            self._check_open()
            raise InvalidArgumentError(
                f"{self.get_name()} has no variables yet: call initialize(var_list) on "
                f"all ranks"
            )
        return part

    def _kept_state(self, var_list: Variables | None) -> KeptState:
        return self.inner._kept_state(self._given_or_known(var_list))

    @overload
    def center(self, var: Variable) -> Array: ...
    @overload
    def center(self, var: Sequence[Variable]) -> list[Array]: ...
    def center(self, var: Variable | Sequence[Variable]) -> Array | list[Array]:
        """Return a copy of the newest value of a variable. Not collective.

        A one-sided optimizer copies the value of the center, a collective one the value
        of this rank.

        Args:
            var: A variable; or a list or tuple of variables, copied at the same step.

        Returns:
            An array in CPU memory; for a list, a list of arrays. After `free`, the
            values of the last update.

        Raises:
            InvalidArgumentError, TypeError: Before `initialize`, or if ``var`` is not
                one of its variables.
        """
        self._initialized(self._values or None)
        several = isinstance(var, (list, tuple))
        variables: Any = var if several else [var]
        self._check_known(check_variables(variables))
        copies = self._read([each.name for each in variables])
        return copies if several else copies[0]

    def _read(self, names: Sequence[str]) -> list[Array]:
        """Return copies of the newest values."""
        return [np.array(to_host(self._values[name])) for name in names]

    def _describe(self) -> str:
        return f"optimizer {self.get_name()!r}"

    def free(self) -> None:
        """Free it. Collective, also of ranks that have left.

        Afterwards the variables of all ranks are those of the last update, also on
        ranks that left early or only served. A Variable that one rank passed as
        ``global_step`` is `global_step` on all ranks; one that did not pass it is found
        by its name. `center`, `global_step`, `statistics` and `get_slot` remain
        available.

        With a server, it leaves, and waits until all ranks have left. A dedicated
        server that has not called `serve` serves until the others have left.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, on all ranks that wait;
                names the missing ranks. Another call on all ranks does the rest.
        """
        super().free()

    def _free(self) -> None:
        release(self._gradients)
        if self._variables is not None:
            self.inner._kept_state(self._variables).release()


def check_inner(inner: Any, outer: Optimizer) -> None:
    """Raise unless ``outer`` can delegate its updates to ``inner``."""
    own = type(outer).__name__
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"{own}: the inner optimizer must be an Optimizer, got {_kind(inner)}"
        )
    if inner.exchange is ExchangeKind.LOCAL:
        return
    # A rank that drops a gradient around a collective makes MPI average different
    # steps, silently.
    if inner.exchange is not outer.exchange or outer.exchange is ExchangeKind.ONE_SIDED:
        raise InvalidArgumentError(
            f"{own}: a {outer.exchange.value} optimizer cannot hold "
            f"{type(inner).__name__}, which is {inner.exchange.value}; give it a local "
            f"one such as SGD"
        )


def _kind(inner: Any) -> str:
    """Return what is given in place of an optimizer, and what helps."""
    if isinstance(inner, type) and issubclass(inner, Optimizer):
        return f"the class {inner.__name__}; call it: {inner.__name__}(0.1)"
    kind = inner if isinstance(inner, type) else type(inner)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    hint = "; for PyTorch use hpcaccum.torch" * name.startswith("torch.")
    return f"{'the class ' * (kind is inner)}{name}{hint}"

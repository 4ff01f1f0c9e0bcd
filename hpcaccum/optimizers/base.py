"""The interface that all optimizers share."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, SupportsFloat

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.device import copyto, library
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.checks import (
    Loss,
    Pairs,
    PairsLike,
    Variables,
    call_loss,
    check_gate,
    check_global_step,
    check_grad_loss,
    check_gradient,
    check_variables,
)
from hpcaccum.optimizers.snapshot import (
    Key,
    Parts,
    check_snapshot,
    plain,
    set_values,
    snapshot_of,
)
from hpcaccum.optimizers.variable import Variable, check_name, is_float
from hpcaccum.rows import IndexedSlices
from hpcaccum.spans import traced


class ExchangeKind(enum.Enum):
    """How an optimizer exchanges gradients with other ranks."""

    LOCAL = "local"
    COLLECTIVE = "collective"
    ONE_SIDED = "one-sided"


class Optimizer(abc.ABC):
    """The interface of every optimizer, that of TensorFlow 1.

    Args:
        name: Prefix of the names of its state.
    """

    # Without a dictionary an optimizer refuses unknown attributes; a subclass that
    # declares no slots accepts any.
    __slots__ = ("__weakref__", "_gradients", "_name", "_variables")

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    exchange: ClassVar[ExchangeKind] = ExchangeKind.LOCAL

    def __init__(self, name: str) -> None:
        self._name = check_name(name)
        self._variables: list[Variable] | None = None
        self._gradients: dict[str, Array] = {}

    def __repr__(self) -> str:
        """Show the name; identical on all ranks, which compare their optimizers."""
        return f"{type(self).__name__}(name={self._name!r})"

    def initialize(self, var_list: Variables) -> None:
        """Set the variables that calls without ``var_list`` use.

        Raises:
            TypeError, InvalidArgumentError: As `check_variables`.
        """
        self._variables = check_variables(var_list)

    def gradient_arrays(self) -> dict[str, Array]:
        """Return arrays in which a loss can compute its next gradients, by name.

        The loss may write to them until `apply_gradients`. An optimizer that exchanges
        gradients sends them from these arrays without a copy. A sparse variable has no
        such array.

        Raises:
            InvalidArgumentError: Before `initialize`.
        """
        for var in check_variables(self._variables):
            if var.name not in self._gradients and not var.sparse:
                new = library(var.value).zeros_like(var.value)
                self._gradients[var.name] = new
        return dict(self._gradients)

    @traced("compute")
    def compute_gradients(
        self,
        loss: Loss,
        var_list: Variables | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: SupportsFloat | None = None,
    ) -> Pairs:
        """Call ``loss`` once and return its gradients with their variables.

        Args:
            loss: Without arguments; returns a value, and gradients in the order of
                ``var_list`` or by name. A gradient is an array or an `IndexedSlices`,
                or None if there is none.
            var_list: None means the variables given to `initialize`.
            gate_gradients: 0, 1 or 2; has no effect.
            aggregation_method: Ignored.
            colocate_gradients_with_ops: Ignored.
            grad_loss: A number that multiplies the gradients.

        Returns:
            Pairs; a gradient is what ``loss`` returned unless ``grad_loss`` is given.

        Raises:
            TypeError: If ``loss`` is not callable, or its result has a different form.
            InvalidArgumentError: If there are no variables, or a gradient does not fit,
                or a mapping lacks a variable.
        """
        check_gate(gate_gradients)
        variables = self._given_or_known(var_list)
        if self._variables is None:
            self.initialize(variables)
        factor = check_grad_loss(grad_loss)
        grads = call_loss(loss, variables)
        pairs: Pairs = [
            (None if grad is None else check_gradient(grad, variable), variable)
            for grad, variable in zip(grads, variables, strict=True)
        ]
        return pairs if factor is None else with_factor(pairs, factor)

    @abc.abstractmethod
    def apply_gradients(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> Receipt | None:
        """Update the variables with their gradients.

        Returns:
            A receipt, if the optimizer exchanges gradients with other ranks.
        """

    def minimize(
        self,
        loss: Loss,
        global_step: Variable | None = None,
        var_list: Variables | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: SupportsFloat | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt | None:
        """Compute gradients and apply them.

        Arguments and errors are those of `compute_gradients` and `apply_gradients`.
        Only optimizers that exchange gradients have a ``weight``.

        Returns:
            What `apply_gradients` returns. An optimizer that exchanges gradients
            returns a `Receipt`, which here contains the value of ``loss``.
        """
        # Alone, a rank that raises is waited for; `apply_gradients` raises on all.
        if self.exchange is not ExchangeKind.COLLECTIVE:
            check_global_step(global_step)
        # What it has returned last.
        results: list[Any] = [None]

        def kept() -> Any:
            results[0] = loss()
            return results[0]

        pairs = self.compute_gradients(
            kept if callable(loss) else loss,
            var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        # A local optimizer has no weight, and True is none.
        usual = type(weight) in (int, float) and weight == 1
        more: dict[str, Any] = {} if usual else {"weight": weight}
        result = self.apply_gradients(pairs, global_step, name, **more)
        if isinstance(result, Receipt):
            return dataclasses.replace(result, loss=results[0] and results[0][0])
        return result

    def get_name(self) -> str:
        """Return its name."""
        return self._name

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return the state called ``name`` of ``var``; None if there is none (yet)."""
        return None

    def get_slot_names(self) -> list[str]:
        """Return the names of the state that each variable has."""
        return []

    def variables(self) -> list[Variable]:
        """Return all state variables, in the order of their creation."""
        return []

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the variables and of their state, to `restore` them.

        Returns:
            "variables": name to array in CPU memory. "state": for each of these names,
            the slots, and "step", the number of updates of the variable.
            `checkpoint.save` writes it to a file.

        Raises:
            InvalidArgumentError: If there are no variables yet.
        """
        state = self._kept_state(None)
        values = {var.name: var.value for var in state.variables}
        parts = state.parts()
        return snapshot_of(values, {key: plain(var) for key, var in parts.items()})

    def restore(
        self, snapshot: Mapping[str, Any], var_list: Variables | None = None
    ) -> None:
        """Initialize, and set the variables and their state to those of a snapshot.

        Args:
            snapshot: Of an optimizer of the same kind.
            var_list: Variables with the names, shapes and dtypes of the snapshot; by
                default those of this optimizer.

        Raises:
            TypeError, InvalidArgumentError: If they do not fit; nothing is changed.
        """
        state = self._kept_state(var_list)
        state.check(snapshot)
        self.initialize(state.variables)
        set_values(state.variables, snapshot)
        state.set(snapshot["state"])

    @property
    def elementwise(self) -> bool:
        """Whether an update changes each element independently of the others."""
        return False

    # The contract with wrappers and adapters, besides the interface above: the next
    # five. For an optimizer of the user, the defaults are right.

    def _needs_for_rows(self) -> str | None:
        """Return what it lacks to change only the rows of a gradient, or None."""
        # Only then can ranks copy these rows instead of the whole variable.
        return f"an inner optimizer that is a rule of hpcaccum, not {self!r}"

    def _fragment(self, variables: Sequence[Variable]) -> Optimizer:
        """Return what updates a group of variables in a thread of its own, or raise."""
        raise InvalidArgumentError(
            f"fragments= needs an outer optimizer that is a rule of hpcaccum, not "
            f"{self!r}"
        )

    def _changed_options(self) -> Sequence[Any]:
        """Return the options that have changed on the host since the last call."""
        # None: on several servers, each uses those of its rank.
        return ()

    def _use_options(self, changed: Sequence[Any]) -> None:
        """Update the center with changed options of the host from now on."""
        raise NotImplementedError

    def _kept_state(self, var_list: Variables | None) -> KeptState:
        """Return the state of variables; for None, of all that this optimizer has."""
        return KeptState(self, self._given_or_known(var_list))

    def _given_or_known(self, var_list: Variables | None) -> list[Variable]:
        """Return checked variables; for None, those of `initialize`."""
        return check_variables(self._variables if var_list is None else var_list)


class KeptState:
    """The state that an optimizer keeps of some variables: here, the slots it shows."""

    def __init__(self, optimizer: Optimizer, variables: list[Variable]) -> None:
        self._optimizer, self.variables = optimizer, variables

    def parts(self) -> dict[Key, Variable]:
        """Return the state, by names of a variable and of a part."""
        slots = {
            (var.name, name): self._optimizer.get_slot(var, name)
            for var in self.variables
            for name in self._optimizer.get_slot_names()
        }
        return {key: slot for key, slot in slots.items() if slot is not None}

    def check(self, snapshot: Any) -> None:
        """Raise unless the variables and the state can be set to a snapshot."""
        check_snapshot(snapshot, self.variables)

    def set(self, states: Mapping[str, Parts]) -> None:
        """Set the state to that of a snapshot."""
        kept, what = self.parts(), self._optimizer.get_name()
        for name, parts in states.items():
            for part, value in parts.items():
                if (name, part) not in kept:
                    raise InvalidArgumentError(
                        f"{what} has no slot {part!r} of {name!r} before the first "
                        f"update, and cannot restore it"
                    )
                copyto(kept[name, part].value, np.asarray(value))

    def forget(self) -> None:
        """Drop the state, as the variables will not be updated any more."""

    def release(self) -> None:
        """Free memory that the next update would allocate again."""


def with_factor(pairs: Pairs, factor: float) -> Pairs:
    """Return pairs with new gradients, times a factor."""
    return [(None if g is None else _scaled(g, factor), var) for g, var in pairs]


def _scaled(grad: Any, factor: float) -> Any:
    """Return a new gradient of the same dtype; of integers, of float64."""
    if isinstance(grad, IndexedSlices):
        values = _scaled(grad.values, factor)
        return IndexedSlices(values, grad.indices, grad.dense_shape)
    dtype = grad.dtype if is_float(grad.dtype) else np.dtype(np.float64)
    product = np.multiply(grad, factor, dtype=accumulation_dtype(dtype))
    return library(grad).asarray(product).astype(dtype, copy=False)

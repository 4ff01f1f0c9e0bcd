"""A torch optimizer as an update rule: of its own parameters, or of a center."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import Optimizer, Variable
from hpcaccum.torch.tensors import array_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hpcaccum.optimizers.snapshot import Key, Parts

# What a parameter group has besides the options of the updates.
_NOT_OPTIONS = ("params", "param_names")


class _Target(NamedTuple):
    """Tensors, and the optimizer that updates them.

    Attributes:
        optimizer: Of PyTorch.
        tensors: By the names of the variables.
    """

    optimizer: Any
    tensors: Mapping[str, Any]


class TorchRule(Optimizer):
    """Updates variables by a torch optimizer.

    The variables are the memory of its own parameters, or those of a center. For a
    center it is copied: the copy has the same options and a state of its own. The
    options are copied again when they have changed, so that a scheduler of the original
    sets the learning rate of the center, too.

    Args:
        optimizer: Of PyTorch.
        parameters: Its parameters, by name.
        sparse: Names of those whose gradients are sparse.

    Attributes:
        own: The parameters as variables.
    """

    def __init__(
        self, optimizer: Any, parameters: Mapping[str, Any], sparse: Collection[str]
    ) -> None:
        super().__init__(type(optimizer).__name__)
        self.own = [
            Variable(array_of(parameter), name, sparse=name in sparse)
            for name, parameter in parameters.items()
        ]
        self._own = _Target(optimizer, parameters)
        self._arrays = {var.name: var.value for var in self.own}
        self._center: _Target | None = None
        # The options that the center has, of each parameter group.
        self._copied: list[dict[str, Any]] = []

    def __repr__(self) -> str:
        """Show the options: the same text on ranks with the same options."""
        groups = [_options(group) for group in self._own.optimizer.param_groups]
        return f"{self.get_name()}({', '.join(map(repr, groups))})"

    def initialize(self, var_list: Any) -> None:
        """Set the variables; copy the optimizer if they are those of a center."""
        super().initialize(var_list)
        variables = list(var_list)
        if not self._has(variables):
            self._center = self._copy_for(variables)
            self._copied = [{} for _ in self._own.optimizer.param_groups]

    def _has(self, variables: Sequence[Variable]) -> bool:
        """Whether the variables are the parameters themselves."""
        first = variables[0]
        return self._arrays[first.name] is first.value

    def _target(self, variables: Sequence[Variable]) -> _Target:
        if self._center is None or self._has(variables):
            return self._own
        return self._center

    def _copy_for(self, variables: Iterable[Variable]) -> _Target:
        tensors = {var.name: tensor_of(var.value) for var in variables}
        memo = {id(p): tensors[name] for name, p in self._own.tensors.items()}
        return _Target(copy.deepcopy(self._own.optimizer, memo), tensors)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Update the variables in place.

        Args:
            grads_and_vars: Pairs. Gradients of the optimizer's own parameters must be
                their ``grad``.
            global_step: Ignored.
            name: Ignored.
        """
        pairs = list(grads_and_vars)
        target = self._target([var for _, var in pairs])
        if target is self._own:
            target.optimizer.step()
            return
        self._copy_options(target)
        for grad, var in pairs:
            tensor = target.tensors[var.name]
            # PyTorch wants the dtype of the parameter; sums may have a wider one.
            tensor.grad = None if grad is None else tensor_of(grad).to(tensor.dtype)
        target.optimizer.step()
        for tensor in target.tensors.values():
            tensor.grad = None

    def _copy_options(self, target: _Target) -> None:
        """Give a center the options that have changed since the last update."""
        groups = self._own.optimizer.param_groups
        theirs = target.optimizer.param_groups
        for group, copied, other in zip(groups, self._copied, theirs, strict=True):
            for name, value in _options(group).items():
                # Only these: some optimizers keep state among the options.
                if copied.get(name) is not value:
                    copied[name] = other[name] = value

    # Snapshots

    def _kept_state(self, variables: Iterable[Variable]) -> dict[Key, Variable]:
        found = list(variables)
        target = self._target(found)
        return {
            (var.name, part): _state_variable(f"{var.name}/{part}", value)
            for var in found
            for part, value in self._parts(target, var).items()
            if value is not None
        }

    def _parts(self, target: _Target, var: Variable) -> dict[str, Any]:
        state: dict[str, Any] = target.optimizer.state.get(target.tensors[var.name], {})
        return state

    def _restore_state(
        self, variables: Sequence[Variable], states: Mapping[str, Parts]
    ) -> None:
        self.set_state(variables, states)

    def set_state(
        self, variables: Sequence[Variable], states: Mapping[str, Parts]
    ) -> None:
        """Replace the state of variables by copies of the parts of a snapshot."""
        target = self._target(variables)
        target.optimizer.state.clear()
        for var in variables:
            if parts := states[var.name]:
                target.optimizer.state[target.tensors[var.name]] = {
                    part: _restored(value) for part, value in parts.items()
                }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, sorted."""
    # A list, as a scheduler may add an option meanwhile.
    items = sorted(group.items())
    return {name: value for name, value in items if name not in _NOT_OPTIONS}


def _restored(value: Any) -> Any:
    """Return a part of a snapshot as an optimizer keeps it."""
    return value if isinstance(value, int) else tensor_of(np.array(value))


def _state_variable(title: str, value: Any) -> Variable:
    """Return a tensor as a variable that shares its memory; a count as a copy."""
    if type(value) is int:
        return Variable(np.array(value), title, trainable=False)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"tensor of {value.layout}"
        raise InvalidArgumentError(
            f"state {title!r} is a {kind}; only dense tensors and integers can be saved"
        )
    return Variable(array_of(value), title, trainable=False)

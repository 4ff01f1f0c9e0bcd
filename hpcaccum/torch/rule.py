"""A torch optimizer as an update rule: of its own parameters, or of a center."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import Optimizer, Variable
from hpcaccum.optimizers.base import KeptState
from hpcaccum.optimizers.snapshot import Key, Parts
from hpcaccum.optimizers.start import checksum
from hpcaccum.optimizers.update_rule import finite
from hpcaccum.rows import IndexedSlices
from hpcaccum.torch.parameters import Parameters, gradient_of, needs_for_rows
from hpcaccum.torch.tensors import CPU, array_of, host_array, laid_out, tensor_of

# What a parameter group has besides the options of the updates.
_NOT_OPTIONS = ("params", "param_names")
# The options with which PyTorch keeps counts of steps where the parameters are.
_CAPTURABLE = "capturable"
_COUNTS_THERE = (_CAPTURABLE, "fused")


class _Target(NamedTuple):
    """Tensors, by the names of the variables, and the optimizer that updates them."""

    optimizer: Any
    tensors: Mapping[str, Any]


class TorchRule(Optimizer):
    """Updates variables by a torch optimizer: its own parameters, or a center's.

    For a center, which is in CPU memory, the optimizer is copied: the copy has a state
    of its own, and the options of the host, which are copied again when they change.
    Several servers have whole variables each, as whether an optimizer is `elementwise`
    cannot be known. It must update each parameter independently of the others.
    """

    def __init__(self, optimizer: Any, parameters: Parameters) -> None:
        super().__init__(type(optimizer).__name__)
        self.optimizer, self.parameters = optimizer, parameters
        # The numbers of the parameter groups that have one with sparse gradients.
        rows = {parameters.tensors[name] for name in parameters.sparse}
        self._row_groups = [
            number
            for number, group in enumerate(optimizer.param_groups)
            if not rows.isdisjoint(group["params"])
        ]
        self._original = _Target(optimizer, parameters.tensors)
        self._center: _Target | None = None
        self._sizes = _sizes(optimizer)
        # Options that the center, or all servers, have, of each parameter group.
        self._copied: list[dict[str, Any]] = [{} for _ in self._sizes]

    def __repr__(self) -> str:
        options = map(_options, self.optimizer.param_groups)
        return f"{self.get_name()}({', '.join(map(repr, options))})"

    def initialize(self, var_list: Any) -> None:
        """Set the variables; copy the optimizer if they are those of a center."""
        super().initialize(var_list)
        variables = list(var_list)
        if not self._has(variables):
            tensors = {var.name: tensor_of(var.value) for var in variables}
            self._center = _Target(_copied(self._original, tensors), tensors)

    def _has(self, variables: Sequence[Variable]) -> bool:
        """Whether the variables are the parameters themselves."""
        first = variables[0]
        return self.parameters.variables[first.name].value is first.value

    def _target(self, variables: Sequence[Variable]) -> _Target:
        if self._center is None or self._has(variables):
            return self._original
        return self._center

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Update the variables in place."""
        self.check_options(self.optimizer.param_groups)
        pairs = list(grads_and_vars)
        target = self._target([var for _, var in pairs])
        if target is self._original:
            target.optimizer.step()
            return
        for grad, var in pairs:
            tensor = target.tensors[var.name]
            tensor.grad = _gradient(grad, tensor)
        target.optimizer.step()
        for tensor in target.tensors.values():
            tensor.grad = None

    def _needs_for_rows(self) -> str | None:
        return self._needs(self.optimizer.param_groups)

    def _needs(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        found = [groups[number] for number in self._row_groups]
        return needs_for_rows(self.optimizer, found) if found else None

    def _fragment(self, variables: Sequence[Variable]) -> TorchRule:
        """Return one with a center of its own."""
        return TorchRule(self.optimizer, self.parameters)

    # The options

    def check_groups(self) -> None:
        """Raise InvalidArgumentError if the optimizer has got parameters since."""
        if _sizes(self.optimizer) != self._sizes:
            raise InvalidArgumentError(
                f"{self.get_name()}: parameters cannot be added later; make a new "
                f"optimizer"
            )

    def _changed_options(self) -> Sequence[dict[str, Any]]:
        self.check_groups()
        changed = []
        for group, copied in zip(
            self.optimizer.param_groups, self._copied, strict=True
        ):
            # Only these: some optimizers keep state among the options.
            found = {
                name: value
                for name, value in _options(group).items()
                if not _is_same(copied.get(name), value)
            }
            copied.update({name: _kept(value) for name, value in found.items()})
            changed.append(found)
        return changed if any(changed) else []

    def _use_options(self, changed: Sequence[dict[str, Any]]) -> None:
        # One of more servers than variables may have no center.
        groups = self._center.optimizer.param_groups if self._center else ()
        for group, options in zip(groups, changed, strict=False):
            group.update(options)

    def learning_rates(self) -> list[float | None]:
        """Return the rate of each parameter group; None if it is no number."""
        return [finite(group.get("lr")) for group in self.optimizer.param_groups]

    def check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless the optimizer, with these options, changes only rows."""
        if (needs := self._needs(groups)) is not None:
            raise InvalidArgumentError(f"sparse gradients on a server need {needs}")

    # Snapshots

    def checksum(self) -> str:
        """Return text that is the same for the same state of the own parameters."""
        state = self.optimizer.state
        found = [
            (name, part, host_array(v) if isinstance(v, torch.Tensor) else v)
            for name, parameter in self.parameters.tensors.items()
            for part, v in sorted(state.get(parameter, {}).items())
        ]
        number = checksum(*itertools.chain(*found))
        return f"checksum {number:016x}" if state else "none"

    def _kept_state(self, var_list: Any) -> KeptState:
        return _KeptByTorch(self, self._given_or_known(var_list))


class _KeptByTorch(KeptState):
    """The state that an optimizer of PyTorch keeps of variables."""

    _optimizer: TorchRule

    def parts(self) -> dict[Key, Variable]:
        target = self._optimizer._target(self.variables)
        state = target.optimizer.state
        return {
            (var.name, part): _state_variable(f"{var.name}/{part}", value)
            for var in self.variables
            for part, value in state.get(target.tensors[var.name], {}).items()
            if value is not None
        }

    def set(self, states: Mapping[str, Parts]) -> None:
        """Replace the state by copies of the parts of a snapshot."""
        target = self._optimizer._target(self.variables)
        target.optimizer.state.clear()
        counts = _places_of_counts(target.optimizer)
        for var in self.variables:
            tensor = target.tensors[var.name]
            if parts := states[var.name]:
                target.optimizer.state[tensor] = {
                    part: _restored(value, tensor, counts[tensor])
                    for part, value in parts.items()
                }


def _copied(original: _Target, tensors: Mapping[str, Any]) -> Any:
    """Return a copy of an optimizer for tensors, by name; it has all its groups."""
    optimizer = original.optimizer
    copies = {original.tensors[name]: tensor for name, tensor in tensors.items()}
    memo: dict[int, Any] = {id(parameter): copies[parameter] for parameter in copies}
    state: dict[Any, Any] = collections.defaultdict(dict)
    for parameter, tensor in copies.items():
        if parameter in optimizer.state:
            parts = copy.deepcopy(optimizer.state[parameter], memo)
            state[tensor] = {part: _moved(parts[part], tensor) for part in parts}
    memo[id(optimizer.state)] = state
    memo[id(optimizer.param_groups)] = [
        {**copy.deepcopy(_options(group), memo), **_some(group, copies)}
        for group in optimizer.param_groups
    ]
    made = copy.deepcopy(optimizer, memo)
    # PyTorch copies none that a subclass has added. Of a scheduler is `step`, which
    # calls that of the original.
    for name in vars(optimizer).keys() - vars(made).keys() - {"step"}:
        setattr(made, name, copy.deepcopy(vars(optimizer)[name], memo))
    return made


def _sizes(optimizer: Any) -> list[int]:
    """Return the numbers of parameters of the groups of an optimizer."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _some(group: Mapping[str, Any], copies: Mapping[Any, Any]) -> dict[str, list[Any]]:
    """Return the copies of the parameters of a group that have one."""
    places = [i for i, each in enumerate(group["params"]) if each in copies]
    found = {"params": [copies[group["params"][i]] for i in places]}
    if names := group.get("param_names"):
        found["param_names"] = [names[i] for i in places]
    return found


def _gradient(grad: Any, tensor: Any) -> Any:
    """Return a gradient as its parameter has it in memory; None remains."""
    if isinstance(grad, IndexedSlices):
        return gradient_of(grad, tensor.dtype)
    if grad is None:
        return None
    # Sums may have a wider dtype.
    return laid_out(tensor_of(grad).to(tensor.dtype), tensor)


def _kept(value: Any) -> Any:
    """Return an option to compare it later; a scheduler changes a tensor in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_same(kept: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(kept, torch.Tensor) and torch.equal(kept, value)
    return kept is value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group for a center, sorted."""
    # A list, as a scheduler may add an option meanwhile.
    items = sorted(group.items())
    found = {n: _in_cpu_memory(value) for n, value in items if n not in _NOT_OPTIONS}
    if _CAPTURABLE in found:
        # PyTorch refuses it in CPU memory, where there is no CUDA graph.
        found[_CAPTURABLE] = False
    return found


def _in_cpu_memory(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _moved(value: Any, tensor: Any) -> Any:
    """Return a part of the state as it is kept for a tensor of a center."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return _in_cpu_memory(value)
    return laid_out(value.cpu(), tensor)


def _places_of_counts(optimizer: Any) -> dict[Any, Any]:
    """Return where PyTorch keeps the count of steps of each parameter, as a tensor."""
    return {
        parameter: parameter.device if any(map(group.get, _COUNTS_THERE)) else CPU
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _restored(value: Any, parameter: Any, place_of_counts: Any) -> Any:
    """Return a part of a snapshot as an optimizer keeps it for a parameter."""
    if isinstance(value, int):
        return value
    tensor = laid_out(tensor_of(np.array(value)), parameter)
    return tensor.to(parameter.device if tensor.ndim else place_of_counts)


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

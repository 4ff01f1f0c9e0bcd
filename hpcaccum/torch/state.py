"""A `state_dict` of an adapter: what torch has in it, and the step that it is of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers import Variable
from hpcaccum.torch.tensors import host_array, numpy_name, tensor_of

# What it has besides "state" and "param_groups".
_OPTIMIZER, _PARAMETERS, _COUNTS = "optimizer", "parameters", ("global_step", "tally")
_KEYS = {"state", "param_groups", _OPTIMIZER, _PARAMETERS, *_COUNTS}


def state_of(snapshot: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return a state dictionary."""
    states = enumerate(snapshot["state"].values())
    return {
        # Before the first update a parameter has no entry.
        "state": {
            number: of_arrays(_tensor, parts) for number, parts in states if parts
        },
        "param_groups": _groups(optimizer),
        _OPTIMIZER: type(optimizer).__name__,
        _PARAMETERS: of_arrays(_tensor, snapshot["variables"]),
        **{count: snapshot[count] for count in _COUNTS},
    }


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups as PyTorch's `state_dict` has them."""
    numbers = itertools.count()
    return [
        {**group, "params": list(itertools.islice(numbers, len(group["params"])))}
        for group in optimizer.param_groups
    ]


def of_arrays(call: Callable[[Any], Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function makes of the arrays or tensors of a state, and counts."""
    return {
        name: part if isinstance(part, int) else call(part)
        for name, part in parts.items()
    }


def _tensor(array: Any) -> Any:
    return tensor_of(np.asarray(array))


def check_state(
    state: Any, optimizer: Any, variables: Mapping[str, Variable]
) -> Mapping[str, Any]:
    """Return a state dictionary that fits an optimizer of PyTorch."""
    if not isinstance(state, Mapping) or not state.keys() >= _KEYS:
        raise TypeError("state_dict must come from an optimizer of hpcaccum.torch")
    own = type(optimizer).__name__
    if state[_OPTIMIZER] != own:
        raise InvalidArgumentError(
            f"the state is of {state[_OPTIMIZER]}, the optimizer is {own}"
        )
    found = [_signature(tensor) for tensor in state[_PARAMETERS].values()]
    wanted = [(str(var.dtype), var.shape) for var in variables.values()]
    sizes = [len(group["params"]) for group in state["param_groups"]]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    if (found, sizes) != (wanted, groups):
        raise InvalidArgumentError(
            f"the state is of different parameters: {_text(found, sizes)}; the "
            f"optimizer has {_text(wanted, groups)}"
        )
    return state


def _signature(tensor: Any) -> tuple[str, tuple[int, ...]]:
    return numpy_name(tensor.dtype), tuple(tensor.shape)


def _text(found: Sequence[tuple[str, tuple[int, ...]]], sizes: Sequence[int]) -> str:
    arrays = ", ".join(f"{dtype} {shape}" for dtype, shape in found)
    return f"{arrays} in groups of {', '.join(map(str, sizes))}"


def snapshot_of(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the snapshot that a checked state dictionary was made from."""
    values = state[_PARAMETERS].values()
    states = state["state"]
    return {
        "variables": of_arrays(host_array, dict(zip(names, values, strict=True))),
        "state": {
            name: of_arrays(host_array, states.get(number, {}))
            for number, name in enumerate(names)
        },
        **{count: state[count] for count in _COUNTS},
    }

"""Checks of what callers pass to optimizers; each returns the value or raises."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpcaccum.arguments import gradient_array, positive_weight
from hpcaccum.device import is_device
from hpcaccum.dtypes import FLOATS
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.slices import Gradient, check_slices
from hpcaccum.optimizers.start import signature
from hpcaccum.optimizers.variable import Variable, is_float, is_integer
from hpcaccum.rows import IndexedSlices

Pairs = list[tuple[Gradient | None, Variable]]

# What callers may pass: any iterable of variables or of pairs, not only a list.
GradientLike = ArrayLike | IndexedSlices | None
PairsLike = Iterable[tuple[GradientLike, Variable]]
Variables = Iterable[Variable]
Loss = Callable[[], tuple[Any, Sequence[GradientLike] | Mapping[str, GradientLike]]]


# Variables


def check_variables(var_list: Any) -> list[Variable]:
    """Return the variables as a list."""
    if var_list is None:
        raise InvalidArgumentError(
            "no variables are known: pass var_list, or call initialize(var_list) first"
        )
    if isinstance(var_list, Variable):
        raise TypeError(
            "var_list must be a list of Variables, got a Variable: write [w]"
        )
    if isinstance(var_list, (str, bytes)) or not isinstance(var_list, Iterable):
        raise TypeError(f"var_list must be a list of Variables, got {var_list!r}")
    variables = list(var_list)
    for number, variable in enumerate(variables):
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list must hold Variables, got {type(variable).__name__} "
                f"at index {number}"
            )
    if not variables:
        raise InvalidArgumentError("var_list is empty")
    names = [variable.name for variable in variables]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(
            f"{names.count(name)} variables are named {name!r}; names must be unique: "
            f'pass a name, as Variable(array, "w")'
        )
    return variables


def check_trainable(variables: Iterable[Variable]) -> None:
    """Raise InvalidArgumentError if a variable has integers, hence no gradient."""
    for var in variables:
        if not is_float(var.dtype):
            raise InvalidArgumentError(
                f"variable {var.name!r} is of {var.dtype} and cannot be trained; use a "
                f"float dtype, or leave it out of var_list"
            )


def listed(var_list: Any) -> Any:
    """Return an iterator as a list, which can be read twice; other values as is."""
    return list(var_list) if isinstance(var_list, Iterator) else var_list


# Gradients


def check_gradient(grad: Any, variable: Variable) -> Gradient:
    """Return a gradient, as an array or an IndexedSlices; it keeps its dtype."""
    value = variable._value
    dtype, shape = value.dtype, value.shape
    if dtype not in FLOATS:
        raise InvalidArgumentError(
            f"{variable.name!r} is of {dtype} and cannot be trained"
        )
    # The common case first: every gradient is checked several times in a step.
    usual = type(grad) is type(value) is np.ndarray
    if usual and grad.dtype is dtype and grad.shape == shape:
        return grad  # type: ignore[no-any-return]
    if isinstance(grad, IndexedSlices):
        return check_slices(grad, variable)
    array = gradient_array(grad, dtype, f"gradient of {variable.name!r}")
    if not type(array) is type(value) is np.ndarray:
        _check_place(array, variable)
    if array.shape != shape:
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} must have shape {shape}, got {array.shape}"
        )
    return array


def _check_place(grad: Any, variable: Variable) -> None:
    """Raise InvalidArgumentError unless a gradient lies where its variable does."""
    value: Any = variable.value
    if is_device(grad) is not is_device(value):
        where = ["in host memory", "on the device"]
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} is {where[is_device(grad)]}, the variable "
            f"is not"
        )
    if is_device(grad) and grad.data.device_id != value.data.device_id:
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} is on device {grad.data.device_id}, the "
            f"variable on device {value.data.device_id}"
        )


def check_pairs(grads_and_vars: PairsLike) -> Pairs:
    """Return gradients and variables as a list of checked pairs."""
    return [
        (None if grad is None else check_gradient(grad, variable), variable)
        for grad, variable in as_pairs(grads_and_vars)
    ]


def as_pairs(grads_and_vars: PairsLike) -> list[tuple[Any, Variable]]:
    """Return gradients and variables as a list of pairs. Gradients are not checked."""
    if not isinstance(grads_and_vars, Iterable):
        raise TypeError(
            "grads_and_vars must be a list of pairs (gradient, Variable), "
            f"got {type(grads_and_vars).__name__}"
        )
    pairs: list[Any] = list(grads_and_vars)
    if not pairs:
        raise InvalidArgumentError("no variables provided")
    if not _are_pairs(pairs):
        pairs = [_pair(item, i) for i, item in enumerate(pairs)]
    grads, variables = zip(*pairs, strict=True)
    if len(set(variables)) < len(pairs):
        names = [variable.name for variable in variables]
        raise InvalidArgumentError(f"a variable is given twice in {names}")
    if set(map(type, grads)) == {NoneType}:
        names = [variable.name for variable in variables]
        text = f"no gradients provided for any variable: {names}"
        raise InvalidArgumentError(text)
    return pairs


def _are_pairs(items: list[Any]) -> bool:
    """Whether these are pairs in their usual form."""
    # A check of each takes longer than an update of all on a device.
    return (
        set(map(type, items)) == {tuple}
        and set(map(len, items)) == {2}
        and set(map(type, map(operator.itemgetter(1), items))) == {Variable}
    )


def _pair(item: Any, index: int) -> tuple[Any, Variable]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(
            "grads_and_vars must hold pairs (gradient, Variable), got "
            f"{type(item).__name__} at index {index}"
        )
    if not isinstance(item[1], Variable):
        raise TypeError(
            "grads_and_vars must hold pairs (gradient, Variable), got "
            f"{type(item[1]).__name__} as the variable at index {index}"
        )
    return item[0], item[1]


# What a loss is and returns


def call_loss(loss: Any, variables: list[Variable]) -> list[Any]:
    """Return the gradients that a loss returns, in the order of the variables."""
    if not callable(loss):
        raise TypeError(
            "loss must be callable without arguments and return (value, gradients), "
            f"got {type(loss).__name__}"
        )
    result = loss()
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"loss must return (value, gradients), got {type(result).__name__}"
        )
    grads = result[1]
    names = [variable.name for variable in variables]
    if isinstance(grads, Mapping):
        unknown = [name for name in grads if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"loss returned gradients for {unknown}, the variables are {names}"
            )
        missing = [name for name in names if name not in grads]
        if missing:
            raise InvalidArgumentError(
                f"loss returned no gradients for {missing}, the variables are {names}; "
                f"return None for a variable that has none, or leave it out of var_list"
            )
        return [grads[name] for name in names]
    if not isinstance(grads, (list, tuple)):
        raise TypeError(
            "loss must return gradients as a list or a mapping by name, "
            f"got {type(grads).__name__}"
        )
    if len(grads) != len(names):
        raise InvalidArgumentError(
            f"loss returned {len(grads)} gradients for {len(names)} variables: {names}"
        )
    return list(grads)


# Options


def check_global_step(global_step: Any) -> Variable | None:
    """Return a global step, which may be None."""
    if global_step is None:
        return None
    if not isinstance(global_step, Variable):
        found = type(global_step).__name__
    elif global_step.shape != () or not is_integer(global_step.dtype):
        found = f"{global_step.dtype} {global_step.shape}"
    else:
        return global_step
    raise TypeError(f"global_step must be an integer Variable of shape (), got {found}")


def check_gate(gate_gradients: Any) -> None:
    """Raise InvalidArgumentError unless it is GATE_NONE, GATE_OP or GATE_GRAPH."""
    if isinstance(gate_gradients, bool) or gate_gradients not in (0, 1, 2):
        raise InvalidArgumentError(
            "gate_gradients must be GATE_NONE, GATE_OP or GATE_GRAPH (0, 1 or 2), "
            f"got {gate_gradients!r}"
        )


def exchanged_weight(weight: Any) -> float:
    """Return a weight, which must be a number also in the dtype of gradients."""
    return positive_weight(weight, np.dtype(np.float32))


def check_grad_loss(grad_loss: Any) -> float | None:
    """Return the factor of the gradients; None if there is none."""
    if grad_loss is None:
        return None
    try:
        return float(grad_loss)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"grad_loss must be one number, got {grad_loss!r}"
        ) from None


def check_groups(groups: Any, size: int) -> list[list[int]]:
    """Return a group assignment; None becomes an empty list."""
    if groups is None or (isinstance(groups, list) and not groups):
        return []
    if not isinstance(groups, list) or not all(isinstance(g, list) for g in groups):
        raise InvalidArgumentError(
            f"group_assignment must be a list of lists of ranks, got {groups!r}"
        )
    ranks = [rank for group in groups for rank in group]
    if not all(isinstance(rank, numbers.Integral) for rank in ranks):
        raise InvalidArgumentError(
            f"group_assignment must contain ranks, got {groups!r}"
        )
    if sorted(ranks) != list(range(size)):
        raise InvalidArgumentError(
            f"group_assignment must contain each rank of 0 to {size - 1} once, "
            f"got {groups}"
        )
    if len({len(group) for group in groups}) != 1:
        raise InvalidArgumentError(
            f"groups of group_assignment must have the same size, got sizes "
            f"{[len(group) for group in groups]}"
        )
    return groups


def check_sparse(
    what: str,
    variables: Sequence[Variable],
    servers: Sequence[int] | None,
    needs: str | None,
) -> None:
    """Raise InvalidArgumentError if a variable is sparse, and ``needs`` is not None."""
    if servers is not None and len(servers) > 1:
        needs = f"one server, got servers={list(servers)}"
    for var in variables:
        if var.sparse and needs is not None:
            raise InvalidArgumentError(
                f"{what}: sparse=True of {var.name!r} needs {needs}; make it without "
                f"sparse=True, or use a cross-shard optimizer"
            )


def declared(variables: Sequence[Variable]) -> dict[str, Any]:
    """Return what must be the same on all ranks of an optimizer with a server."""
    return {
        "variables": signature(variables),
        "capacities of sparse variables": capacities(variables),
    }


def capacities(variables: Sequence[Variable], gradients: int = 1) -> dict[str, int]:
    """Return the maximum number of rows of a rank in one update, by sparse variable."""
    return {
        var.name: min(gradients * var.capacity, var.shape[0])
        for var in variables
        if var.sparse
    }

"""Checks of pairs (gradient, Variable), as callers pass them to optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.checks import Pairs, PairsLike, check_gradient
from hpcaccum.optimizers.slices import Gradient
from hpcaccum.optimizers.variable import Variable


def check_pairs(grads_and_vars: PairsLike) -> Pairs:
    """Return gradients and variables as a list of checked pairs."""
    return [
        (None if grad is None else check_gradient(grad, variable), variable)
        for grad, variable in as_pairs(grads_and_vars)
    ]


def check_gradients(
    pairs: Iterable[tuple[Any, Variable]],
) -> list[tuple[Gradient, Variable]]:
    """Return pairs, of which no gradient is None, after `check_gradient`."""
    return [(check_gradient(grad, variable), variable) for grad, variable in pairs]


def as_pairs(grads_and_vars: PairsLike) -> list[tuple[Any, Variable]]:
    """Return gradients and variables as a list of pairs. Gradients are not checked."""
    if not isinstance(grads_and_vars, Iterable):
        raise TypeError(
            "grads_and_vars must be a list of pairs (gradient, Variable), "
            f"got {type(grads_and_vars).__name__}"
        )
    pairs: list[Any] = list(grads_and_vars)
    if not _are_pairs(pairs):
        pairs = [_pair(item, i) for i, item in enumerate(pairs)]
    if not pairs:
        raise InvalidArgumentError("no variables provided")
    names = (variable.name for _, variable in pairs)
    if len({variable for _, variable in pairs}) < len(pairs):
        raise InvalidArgumentError(f"a variable is given twice in {list(names)}")
    if all(grad is None for grad, _ in pairs):
        text = f"no gradients provided for any variable: {list(names)}"
        raise InvalidArgumentError(text)
    return pairs


def _are_pairs(items: list[Any]) -> bool:
    """Whether these are pairs in their usual form."""
    # A check of each takes longer than an update of all on a device.
    return (
        set(map(type, items)) == {tuple}
        and set(map(len, items)) == {2}
        and {type(item[1]) for item in items} == {Variable}
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

"""Gradients that are `IndexedSlices`: their checks, and their forms for an exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcaccum.device import is_device, to_host
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.variable import Variable
from hpcaccum.overlap import crossing, overlap
from hpcaccum.rows import UNKNOWN, IndexedSlices, Rows, check_indices, rows_of, sliced

Gradient = Array | IndexedSlices
G = TypeVar("G", bound=Array | IndexedSlices | Rows)


def check_slices(grad: IndexedSlices, variable: Variable) -> IndexedSlices:
    """Return a gradient of rows, in CPU memory."""
    name, shape, rows = variable.name, variable.shape, grad.values.shape[1:]
    if is_device(variable.value):
        raise InvalidArgumentError(
            f"gradient of {name!r} is an IndexedSlices, the variable is on the device"
        )
    if grad.on_device and not variable.sparse:
        raise InvalidArgumentError(
            f"gradient of {name!r} is an IndexedSlices on the device, the variable is "
            f"in CPU memory; make the variable with sparse=True to accept it"
        )
    if not shape or rows != shape[1:]:
        raise InvalidArgumentError(
            f"gradient of {name!r}, which has shape {shape}, cannot have rows of shape "
            f"{rows}"
        )
    if grad.dense_shape not in (None, shape, (UNKNOWN, *shape[1:])):
        raise InvalidArgumentError(
            f"gradient of {name!r} must have dense_shape {shape}, got "
            f"{grad.dense_shape}"
        )
    if grad.on_device:
        values, indices = to_host(grad.values), to_host(grad.indices)
        grad = IndexedSlices(values, indices, grad.dense_shape)
    try:
        check_indices(grad.indices, shape[0])
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"gradient of {name!r}: {error}") from None
    return grad


def exchanged(
    pairs: Sequence[tuple[Gradient | None, Variable]],
    places: Callable[[], Mapping[str, Array]] | None = None,
) -> dict[str, Any]:
    """Return what is exchanged of gradients: rows of sparse variables, else arrays.

    A server has ``places`` for its arrays, and for `capacity` rows of a variable.
    """
    to_rows = _sparse_rows if places is None else _limited_rows
    found: dict[str, Any] = {}
    slices: list[tuple[IndexedSlices, Variable]] = []
    for grad, var in pairs:
        if grad is not None and var.sparse:
            found[var.name] = to_rows(grad, var, accumulation_dtype(var.dtype))
        elif grad is not None:
            found[var.name] = grad
            if isinstance(grad, IndexedSlices):
                slices.append((grad, var))
    memory = places() if slices and places is not None else {}
    for grad, var in slices:
        place = memory.get(var.name)
        others = [
            each if isinstance(each, np.ndarray) else each.values
            for name, each in found.items()
            if name != var.name
        ]
        if place is None or any(crossing(others, [place])):
            place = np.empty(var.shape, accumulation_dtype(var.dtype))
        add_slices(place, grad, first=True)
        found[var.name] = place
    return found


def _sparse_rows(grad: Gradient, variable: Variable, dtype: np.dtype[Any]) -> Rows:
    if not isinstance(grad, IndexedSlices):
        raise TypeError(
            f"gradient of {variable.name!r}, which is sparse, must be an IndexedSlices"
        )
    return rows_of(grad, dtype)


def with_sums(
    pairs: Sequence[tuple[Gradient | None, Variable]],
    sums: Mapping[str, Array | Rows],
) -> list[tuple[Gradient | None, Variable]]:
    """Return the pairs with the sums of gradients instead of these."""
    return [(None if g is None else _summed(sums[v.name], v), v) for g, v in pairs]


def _summed(total: Array | Rows, variable: Variable) -> Gradient:
    return sliced(total, variable.shape) if isinstance(total, Rows) else total


def copied_rows(
    pairs: Sequence[tuple[Gradient | None, Variable]], dtype: np.dtype[Any]
) -> dict[str, Rows]:
    """Return copies of the gradients of sparse variables that are not None, by name."""
    found = {
        var.name: _limited_rows(grad, var, dtype)
        for grad, var in pairs
        if grad is not None and var.sparse
    }
    # The user may write to the arrays of a gradient afterwards.
    return {
        name: Rows(rows.indices.copy(), rows.weights, rows.values.copy())
        for name, rows in found.items()
    }


def _limited_rows(grad: Gradient, variable: Variable, dtype: np.dtype[Any]) -> Rows:
    rows = _sparse_rows(grad, variable, dtype)
    if rows.indices.size > variable.capacity:
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} has {rows.indices.size} different rows, at "
            f"most {variable.capacity} can be sent (capacity=)"
        )
    return rows


def add_slices(total: Array, grad: IndexedSlices, first: bool) -> None:
    """Add a checked gradient to an array, or set the array to it if it is the first."""
    rows = sliced(rows_of(grad, total.dtype), total.shape)
    values = rows.values
    if first:
        values = values.copy() if overlap(values, total) else values
        total[...] = 0
    total[rows.indices] += values


def apart(grads: Sequence[G], values: Sequence[Array]) -> list[G]:
    """Copy the gradients that lie in the memory of variables, which change next."""
    # The gradient of `x * y` by `y` is `x`.
    arrays = [g.values if isinstance(g, (IndexedSlices, Rows)) else g for g in grads]
    suspect = crossing(arrays, values)
    return [
        _copied(grad) if each and any(overlap(array, v) for v in values) else grad
        for grad, array, each in zip(grads, arrays, suspect, strict=True)
    ]


def _copied(grad: Any) -> Any:
    if isinstance(grad, IndexedSlices):
        return IndexedSlices(grad.values.copy(), grad.indices.copy(), grad.dense_shape)
    if isinstance(grad, Rows):
        return grad._replace(values=grad.values.copy())
    return grad.copy()

"""Sparse gradients, of some rows of a parameter, and the optimizers for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcaccum.arguments import positive_count
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.rows import IndexedSlices
from hpcaccum.torch.tensors import array_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The optimizers that update only the rows of a sparse gradient, if these options are
# zero or False: with the last one, PyTorch refuses sparse gradients.
_UPDATE_ROWS: dict[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "weight_decay", "fused"),
    torch.optim.Adagrad: ("weight_decay", "fused"),
    torch.optim.SparseAdam: (),
}


def names_of(sparse: Iterable[Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters whose gradients are sparse."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = []
    for place, parameter in enumerate(_tensors(sparse)):
        if (name := names.get(id(parameter))) is None:
            raise InvalidArgumentError(
                f"sparse[{place}] is not a parameter of the optimizer"
            )
        if not parameter.ndim:
            raise InvalidArgumentError(f"{name!r} in sparse= is a number, without rows")
        found.append(name)
    return found


def _tensors(sparse: Any) -> list[Any]:
    if isinstance(sparse, torch.Tensor) or not isinstance(sparse, Iterable):
        raise TypeError(
            f"sparse must be a list of parameters, got {type(sparse).__name__}"
        )
    return list(sparse)


def check_needs(optimizer: Any, names: Mapping[str, Any], sparse: list[str]) -> None:
    """Raise InvalidArgumentError if an optimizer gets gradients that it cannot use."""
    dense = [name for name in names if name not in sparse]
    if dense and isinstance(optimizer, torch.optim.SparseAdam):
        raise InvalidArgumentError(
            f"SparseAdam needs sparse gradients, and {dense[0]!r} has none: name all "
            f"of its parameters in sparse=[...]"
        )


def check_capacity(capacity: Any, sparse: list[str]) -> None:
    """Check a maximum number of rows of sparse gradients; None if there is none."""
    if capacity is None:
        return
    if not sparse:
        raise InvalidArgumentError("capacity needs parameters in sparse=[...]")
    positive_count(capacity, "capacity")


def needs_for_rows(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what an optimizer lacks to update only the rows of sparse gradients.

    Returns:
        None if it surely updates no other rows.
    """
    own = type(optimizer)
    found = [
        f"{name}={group[name]}"
        for group in groups
        for name in _UPDATE_ROWS.get(own, ())
        if group.get(name)
    ]
    if own in _UPDATE_ROWS and not found:
        return None
    return (
        f"SparseAdam, SGD without momentum and weight_decay, or Adagrad without "
        f"weight_decay, and not fused; not {own.__name__}"
        f"{' with ' if found else ''}{', '.join(dict.fromkeys(found))}"
    )


def check_dense(name: str, gradient: Any) -> None:
    """Raise InvalidArgumentError if a gradient is sparse."""
    if gradient.layout != torch.strided:
        raise InvalidArgumentError(
            f"the gradient of {name!r} is sparse; name this parameter in sparse=[...] "
            f"on all ranks, or make the module with sparse=False"
        )


def slices_of(name: str, gradient: Any) -> IndexedSlices:
    """Return a sparse gradient as rows that share its memory."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise InvalidArgumentError(
            f"the gradient of {name!r}, which is in sparse=, must be a sparse tensor "
            f"of rows, got {_kind(gradient)}; make the module with sparse=True, or "
            f"leave the parameter out of sparse="
        )
    # `indices` and `values` refuse repeated rows.
    indices, values = gradient._indices()[0], gradient._values()
    return IndexedSlices(array_of(values), array_of(indices), tuple(gradient.shape))


def _kind(gradient: Any) -> str:
    if gradient.layout == torch.sparse_coo:
        return f"one with {gradient.sparse_dim()} sparse dimensions"
    return f"one of {gradient.layout}"


def gradient_of(slices: IndexedSlices, dtype: Any) -> Any:
    """Return rows, ascending and each of them once, as a sparse tensor."""
    indices = tensor_of(slices.indices)[None]
    values = tensor_of(np.asarray(slices.values)).to(dtype)
    assert slices.dense_shape is not None
    return torch.sparse_coo_tensor(
        indices, values, slices.dense_shape, is_coalesced=True, check_invariants=False
    )

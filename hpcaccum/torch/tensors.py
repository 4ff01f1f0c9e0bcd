"""Tensors and arrays that share memory, and the parameters of a torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcaccum.dtypes import BFLOAT16
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = np.ndarray[Any, Any]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def array_of(tensor: Any) -> Array:
    """Return an array that shares the memory of a tensor."""
    if tensor.dtype == torch.bfloat16:
        # NumPy has no such dtype of its own.
        bits: Array = tensor.detach().view(torch.int16).numpy()
        return bits.view(BFLOAT16)
    return tensor.detach().numpy()  # type: ignore[no-any-return]


def tensor_of(array: Array) -> Any:
    """Return a tensor that shares the memory of an array."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numpy_name(dtype: Any) -> Any:
    """Return the name that NumPy has for a dtype of PyTorch; other values as is."""
    return (
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    )


def check_optimizer(optimizer: Any, adapter: type) -> None:
    """Raise unless an adapter can hold an optimizer.

    Raises:
        TypeError: If it is not an optimizer of PyTorch.
        InvalidArgumentError: If it is an adapter itself, or needs more than gradients.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be one of torch.optim, got {name}")
    if isinstance(optimizer, adapter):
        raise InvalidArgumentError(
            f"{name} exchanges gradients already; pass the optimizer that it holds"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidArgumentError(
            f"{name} calls a closure several times in a step, and cannot be used: each "
            f"rank has one gradient in a step"
        )


def check_module(module: Any) -> None:
    """Raise TypeError unless it is a module or None."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {type(module).__name__}"
        )


def named_parameters(optimizer: Any, module: Any) -> dict[str, Any]:
    """Return the parameters of an optimizer, by the names that messages have.

    Args:
        optimizer: Of PyTorch.
        module: The module from which names come, or None: names that the optimizer was
            given, or numbers.

    Raises:
        InvalidArgumentError: If a parameter cannot be exchanged.
    """
    names: dict[Any, str] = {}
    if module is not None:
        names = {each: name for name, each in module.named_parameters()}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        given = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], given, strict=True):
            own = names.get(parameter) or name or f"parameter {len(found)}"
            found[own] = parameter
    _check_devices(found.values())
    for name, parameter in found.items():
        _check_parameter(name, parameter)
    return found


def _check_devices(parameters: Iterable[Any]) -> None:
    devices = sorted({str(each.device) for each in parameters})
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"all parameters must be on one device, they are on {', '.join(devices)}"
        )
    if devices != ["cpu"]:
        raise InvalidArgumentError(
            f"the parameters are on {devices[0]}; only tensors in CPU memory can be "
            f"used, others are not supported yet"
        )


def _check_parameter(name: str, parameter: Any) -> None:
    if parameter.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"{name!r} is of {parameter.dtype}, and must be of one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if parameter.layout != torch.strided:
        raise InvalidArgumentError(f"{name!r} is sparse, which is not supported yet")


def check_dense(name: str, gradient: Any) -> None:
    """Raise InvalidArgumentError if a gradient is sparse."""
    if gradient.layout != torch.strided:
        raise InvalidArgumentError(
            f"the gradient of {name!r} is sparse; exchange it by CrossShard(..., "
            f"sparse=[...]) with this parameter on all ranks, or make the module with "
            f"sparse=False"
        )


# Gradients of rows


def names_of(sparse: Iterable[Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters whose gradients are sparse.

    Args:
        sparse: These parameters.
        parameters: All of the optimizer, by name.

    Raises:
        TypeError: If ``sparse`` is not a list of tensors.
        InvalidArgumentError: If one of them is not a parameter of the optimizer, or has
            no rows.
    """
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
            f"of its parameters in CrossShard(..., sparse=[...])"
        )


def slices_of(name: str, gradient: Any) -> IndexedSlices:
    """Return a sparse gradient as rows that share its memory.

    Raises:
        InvalidArgumentError: If it is an array, or not sparse by rows.
    """
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

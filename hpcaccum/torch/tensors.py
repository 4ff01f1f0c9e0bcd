"""Tensors and arrays that share memory, and the parameters of a torch optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from hpcaccum.device import on_stream, shared_array
from hpcaccum.dtypes import BFLOAT16, Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import MPI

CPU, CUDA = "cpu", "cuda"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def array_of(tensor: Any) -> Array:
    """Return an array that shares the memory of a tensor: of NumPy, or of CuPy."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        # NumPy has no such dtype of its own.
        return _shared(tensor.view(torch.int16)).view(BFLOAT16)
    return _shared(tensor)


def host_array(tensor: Any) -> Array:
    """Return an array that shares the memory of a tensor; of a device's, a copy."""
    return array_of(tensor.cpu())


def _shared(tensor: Any) -> Array:
    return shared_array(tensor) if is_cuda(tensor) else tensor.numpy()


def is_cuda(tensor: Any) -> bool:
    """Whether a tensor is on a CUDA device."""
    return tensor.device.type == CUDA  # type: ignore[no-any-return]


def stream_of(tensor: Any) -> AbstractContextManager[None]:
    """Return a block in which work on the tensor's device is in PyTorch's order."""
    if not is_cuda(tensor):
        return contextlib.nullcontext()
    return on_stream(torch.cuda.current_stream(tensor.device).cuda_stream)


def tensor_of(array: Array) -> Any:
    """Return a tensor that shares the memory of an array."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def laid_out(tensor: Any, like: Any) -> Any:
    """Return a tensor that lies in memory like another one, if it has its shape."""
    # The fused optimizers of PyTorch combine elements by their places in memory.
    if tensor.shape != like.shape or tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def numpy_name(dtype: Any) -> Any:
    """Return the name that NumPy has for a dtype of PyTorch; other values as is."""
    return (
        str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    )


def check_optimizer(optimizer: Any, adapter: type) -> None:
    """Raise unless an adapter can hold an optimizer."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be one of torch.optim, got {name}")
    if isinstance(optimizer, adapter):
        raise InvalidArgumentError(
            f"{name} already exchanges gradients; pass the optimizer that it wraps"
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
    """Return the parameters of an optimizer, by the names that messages have."""
    names: dict[Any, str] = {}
    if module is not None:
        names = {each: name for name, each in module.named_parameters()}
    found: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for group in optimizer.param_groups:
        given = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], given, strict=True):
            own = names.get(parameter) or name or f"parameter {len(found)}"
            if parameter in first:
                raise InvalidArgumentError(
                    f"the optimizer has {first[parameter]!r} twice"
                )
            while own in found:
                # Modules of two groups may have the same names.
                own = f"{own} ({len(found)})"
            found[own], first[parameter] = parameter, own
    _check_devices(list(found.values()))
    for name, parameter in found.items():
        _check_parameter(name, parameter)
    return found


def _check_devices(parameters: Sequence[Any]) -> None:
    devices = sorted({str(each.device) for each in parameters})
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"all parameters must be on one device, they are on {', '.join(devices)}"
        )
    device = parameters[0].device
    if device.type not in (CPU, CUDA):
        raise InvalidArgumentError(
            f"the parameters are on {device}; only tensors in CPU memory or on a CUDA "
            f"device can be used"
        )
    if device.type == CUDA:
        _check_cuda(device.index)


def _check_cuda(number: int) -> None:
    current = torch.cuda.current_device()
    if number != current:
        raise InvalidArgumentError(
            f"the parameters are on device {number}, the current one is {current}; "
            f"call torch.cuda.set_device({number}) first"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise InvalidArgumentError(
            "MPI provides no MPI_THREAD_SERIALIZED, which gradients on a device need: "
            "PyTorch computes them in a thread of its own"
        )


def _check_parameter(name: str, parameter: Any) -> None:
    if parameter.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"{name!r} has dtype {parameter.dtype}, and not one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if parameter.layout != torch.strided:
        raise InvalidArgumentError(f"{name!r} is sparse, which is not supported yet")

"""A CUDA device for PyTorch, simulated: for tests of adapters without a GPU.

PyTorch is given a device with a backend in Python. The memory of its tensors is that of
the simulated CuPy, where kernels and copies run late. Operations of PyTorch run on the
CPU after all work that was queued on its current stream, and are late, too: what they
write is poison until that stream gets there.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import cupy
import numpy as np
import torch
from cupy import _dlpack
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hpcaccum.torch import tensors

# What `device.type` is, instead of "cuda": this PyTorch knows no CUDA.
NAME = "simulated"


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device.

    Attributes:
        host: A tensor of the same memory, for operations.
        memory: The memory, which lives as long as this.
    """

    host: torch.Tensor
    memory: Any

    @staticmethod
    def __new__(cls, host: torch.Tensor, memory: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=f"{NAME}:0",
        )
        made.host, made.memory = host, memory
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.detach().clone())

    def __dlpack_device__(self) -> Any:
        return _dlpack.CUDA, self.memory.device_id

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        assert not self.requires_grad
        own, other = _stream(), cupy.cuda.stream._queue_of(stream)
        event = own.record()
        other.put(lambda: event._queue.run(event._number))
        return _dlpack.capsule(self.host.numpy(), self.memory, max_version)

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None):
        _stream().synchronize()
        wanted, devices = (kwargs or {}).get("device"), {}
        args, options = _on_host((args, dict(kwargs or {})), devices)
        if wanted is not None:
            options["device"] = "cpu"
        result = func(*args, **options)
        if wanted is not None and torch.device(wanted).type == "cpu":
            return _pytree.tree_map(_copied, result)
        _delay_written(func, args, options, devices)
        return _pytree.tree_map(lambda found: _on_device(found, devices), result)


def _on_host(tree: Any, devices: dict[int, DeviceTensor]) -> Any:
    """Return arguments for the CPU; note the tensors that were on the device."""

    def host_of(found: Any) -> Any:
        if not isinstance(found, DeviceTensor):
            return found
        devices[id(found.host)] = found
        # As PyTorch does in the threads of its backward passes.
        found.memory.device.use()
        return found.host

    return _pytree.tree_map(host_of, tree)


def _delay_written(
    func: Any, args: Any, options: Any, devices: dict[int, DeviceTensor]
) -> None:
    """Delay what an operation has written to tensors on the device."""
    for number, parameter in enumerate(func._schema.arguments):
        if parameter.is_write:
            by_place = number < len(args)
            given = args[number] if by_place else options.get(parameter.name)
            for host in _pytree.tree_leaves(given):
                if id(host) in devices:
                    _delay(host)


def _copied(found: Any) -> Any:
    # A conversion that has nothing to do would return the device's memory.
    return found.clone() if isinstance(found, torch.Tensor) else found


def _on_device(found: Any, devices: dict[int, DeviceTensor]) -> Any:
    """Return the tensor itself that was changed in place, a view of it, or a copy."""
    if not isinstance(found, torch.Tensor):
        return found
    if id(found) in devices:
        return devices[id(found)]
    storage = found.untyped_storage().data_ptr()
    for other in devices.values():
        if found.numel() and other.host.untyped_storage().data_ptr() == storage:
            return DeviceTensor(found, other.memory)
    return to_device(found)


def _delay(host: torch.Tensor) -> None:
    """Let the values of a tensor come when the current stream gets there."""
    values = host.clone()
    host.fill_(torch.nan if host.is_floating_point() else -1)
    _stream()._queue.put(lambda: host.copy_(values))


def to_device(host: torch.Tensor) -> DeviceTensor:
    """Return a copy of a tensor of the CPU on the device."""
    with _stream():
        # It may be given to another tensor in the order of this stream.
        memory = cupy.cuda.Memory(host.numel() * host.element_size())
    # What was queued before may still use it.
    _stream().synchronize()
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    array = cupy.ndarray((memory.size,), np.uint8, pointer)._host
    flat = torch.from_numpy(array) if memory.size else torch.empty(0, dtype=torch.uint8)
    made = flat.view(host.dtype).view(host.shape)
    made.copy_(host.detach())
    _delay(made)
    return DeviceTensor(made, memory)


def _stream() -> Any:
    """Return the current stream of PyTorch, of all its threads."""
    return _current[0]


_current = [cupy.cuda.Stream.null]


def use_stream(stream: Any) -> None:
    """Make a stream of the simulated CuPy the current one of PyTorch."""
    _current[0] = stream


def _empty(size: Any, *args: Any, **options: Any) -> Any:
    return to_device(torch.empty(size, dtype=options.get("dtype")))


def _empty_strided(size: Any, stride: Any, **options: Any) -> Any:
    return to_device(torch.empty_strided(size, stride, dtype=options.get("dtype")))


@functools.cache
def register() -> Any:
    """Give PyTorch the device, before the first backward pass of the process.

    Returns:
        What must be kept for as long as the device is used.
    """
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


def install(monkeypatch: Any) -> None:
    """Let adapters take the simulated device for a CUDA device, during a test."""
    use_stream(cupy.cuda.Stream.null)
    monkeypatch.setattr(tensors, "CUDA", NAME)
    stream = lambda device=None: types.SimpleNamespace(cuda_stream=_stream().ptr)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

"""The buffers of a module, such as the running means of a batch norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hpcaccum.arguments import one_of
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group
from hpcaccum.optimizers import Variable
from hpcaccum.optimizers.start import broadcast
from hpcaccum.reducer import Reducer
from hpcaccum.torch.tensors import (
    CPU,
    array_of,
    host_array,
    is_cuda,
    numpy_name,
    tensor_of,
)

AVERAGE, BROADCAST = "average", "broadcast"


class Buffers:
    """The buffers of a module, or of none, and its parameters that are not trained.

    ``mode`` is what `sync` does with buffers of floats: "average" or "broadcast".
    """

    def __init__(self, module: Any, trained: Iterable[Any], mode: str) -> None:
        one_of("buffers", mode, (AVERAGE, BROADCAST))
        self._mode, self._module, known = mode, module, set(trained)
        named = () if module is None else module.named_parameters()
        self._fixed = _checked(
            (name, each) for name, each in named if each not in known
        )

    def _found(self) -> dict[str, Any]:
        """Return the buffers that the module has now; it may have replaced some."""
        return _checked(() if self._module is None else self._module.named_buffers())

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        return {
            "buffers": self._mode,
            "parameters that are not trained": _signature(self._fixed),
            "buffers of the module": _signature(self._found()),
        }

    def broadcast(self, group: Group, what: str) -> None:
        """Set all of them to those of rank 0. Collective."""
        broadcast(group, _variables({**self._fixed, **self._found()}), what)

    def sync(self, group: Group, what: str) -> None:
        """Average or broadcast the buffers. Collective."""
        found = group.agree(
            f"{what}: sync_buffers",
            self._found,
            lambda found: {"buffers of the module": _signature(found)},
        )
        averaged = {
            name: each
            for name, each in found.items()
            if self._mode == AVERAGE and each.is_floating_point()
        }
        others = {name: found[name] for name in found if name not in averaged}
        broadcast(group, _variables(others), what)
        if averaged:
            arrays = {name: host_array(each) for name, each in averaged.items()}
            with Reducer(Layout.of(arrays), group, f"{what}: buffers") as reducer:
                reducer.reduce(arrays, out=arrays)
            for name, tensor in averaged.items():
                _copy_back(tensor, arrays[name])


def _checked(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return tensors that can be sent."""
    tensors = {name: tensor.detach() for name, tensor in named}
    for name, tensor in tensors.items():
        usable = tensor.device.type == CPU or is_cuda(tensor)
        if not usable or tensor.layout != torch.strided:
            raise InvalidArgumentError(
                f"{name!r} is {tensor.layout} on {tensor.device}; only dense tensors "
                f"in CPU memory or on a CUDA device can be used"
            )
        if tensor.dtype.is_complex:
            raise InvalidArgumentError(
                f"{name!r} is complex, which is not supported yet"
            )
        # NumPy may lack the dtype.
        array_of(tensor.new_empty(0, device=CPU))
    return tensors


def _signature(tensors: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    return [
        (n, tuple(each.shape), numpy_name(each.dtype)) for n, each in tensors.items()
    ]


def _variables(tensors: Mapping[str, Any]) -> Iterator[Variable]:
    """Yield variables; copy each back to its tensor before the next."""
    for name, tensor in tensors.items():
        array = host_array(tensor)
        # Variables have numbers.
        yield Variable(array.view(np.uint8) if array.dtype == bool else array, name)
        _copy_back(tensor, array)


def _copy_back(tensor: Any, array: Array) -> None:
    if is_cuda(tensor):
        tensor.copy_(tensor_of(array))

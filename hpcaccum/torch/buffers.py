"""The buffers of a module, such as the running means of a batch norm."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcaccum.arguments import one_of
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.optimizers import Variable
from hpcaccum.optimizers.start import broadcast, signature
from hpcaccum.optimizers.variable import is_float
from hpcaccum.reducer import Reducer
from hpcaccum.torch.tensors import CPU, array_of, is_cuda, tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpcaccum.mpi import Group

AVERAGE, BROADCAST = "average", "broadcast"


class Buffers:
    """The buffers of a module, or of none, and its parameters that are not trained.

    ``mode`` is what `sync` does with buffers of floats: "average" or "broadcast".
    """

    def __init__(self, module: Any, trained: Iterable[Any], mode: str) -> None:
        one_of("buffers", mode, (AVERAGE, BROADCAST))
        self._mode, self._module = mode, module
        # Tensors on a device, and variables that are copies of them, by name.
        self._copies: dict[str, tuple[Any, Variable]] = {}
        self._fixed: list[Variable] = []
        self._buffers: list[Variable] = []
        if module is not None:
            known = set(trained)
            self._fixed = [
                self._variable(name, parameter)
                for name, parameter in module.named_parameters()
                if parameter not in known
            ]
            self._buffers = self._found()

    def _found(self) -> list[Variable]:
        """Return the buffers that the module has now; it may have replaced some."""
        if self._module is None:
            return []
        return [self._variable(*each) for each in self._module.named_buffers()]

    def _variable(self, name: str, tensor: Any) -> Variable:
        _check(name, tensor)
        array = array_of(tensor.cpu())
        # Variables have numbers.
        var = Variable(array.view(np.uint8) if array.dtype == bool else array, name)
        if is_cuda(tensor):
            self._copies[name] = tensor, var
        return var

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        return {
            "buffers": self._mode,
            "parameters that are not trained": signature(self._fixed),
            "buffers of the module": signature(self._buffers),
        }

    def broadcast(self, group: Group, what: str) -> None:
        """Set all of them to those of rank 0. Collective."""
        with self._in_cpu_memory():
            broadcast(group, [*self._fixed, *self._buffers], what)

    @contextlib.contextmanager
    def _in_cpu_memory(self) -> Iterator[None]:
        """Copy tensors from a device before the block, and back after it."""
        copies = self._copies.values()
        pairs = [(t.detach(), tensor_of(var.value)) for t, var in copies]
        for tensor, copy in pairs:
            copy.copy_(tensor)
        yield
        for tensor, copy in pairs:
            tensor.copy_(copy)

    def sync(self, group: Group, what: str) -> None:
        """Average or broadcast the buffers. Collective."""
        self._buffers = group.agree(
            f"{what}: sync_buffers",
            self._found,
            lambda found: {"buffers of the module": signature(found)},
        )
        averaged = [
            var
            for var in self._buffers
            if self._mode == AVERAGE and is_float(var.dtype)
        ]
        arrays = {var.name: var.value for var in averaged}
        others = [var for var in self._buffers if var not in averaged]
        with self._in_cpu_memory():
            broadcast(group, others, what)
            if averaged:
                with Reducer(Layout.of(arrays), group, f"{what}: buffers") as reducer:
                    reducer.reduce(arrays, out=arrays)


def _check(name: str, tensor: Any) -> None:
    usable = tensor.device.type == CPU or is_cuda(tensor)
    if not usable or tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name!r} is {tensor.layout} on {tensor.device}; only dense tensors in "
            f"CPU memory or on a CUDA device can be used"
        )
    if tensor.dtype.is_complex:
        raise InvalidArgumentError(f"{name!r} is complex, which is not supported yet")

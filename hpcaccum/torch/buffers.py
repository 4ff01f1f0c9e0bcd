"""The buffers of a module, such as the running means of a batch norm."""

from __future__ import annotations

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
from hpcaccum.torch.tensors import array_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcaccum.mpi import Group

AVERAGE, BROADCAST = "average", "broadcast"


class Buffers:
    """The buffers of a module, and its parameters that no optimizer changes.

    Args:
        module: The module; None if there are no buffers.
        trained: The parameters that an optimizer changes.
        mode: What `sync` does with buffers of floats: "average" or "broadcast".

    Raises:
        InvalidArgumentError: If ``mode`` is another one, or a buffer cannot be sent.
    """

    def __init__(self, module: Any, trained: Iterable[Any], mode: str) -> None:
        one_of("buffers", mode, (AVERAGE, BROADCAST))
        self._mode = mode
        self._fixed: list[Variable] = []
        self._buffers: list[Variable] = []
        if module is None:
            return
        known = set(trained)
        for name, parameter in module.named_parameters():
            if parameter not in known:
                self._fixed.append(_variable(name, parameter))
        for name, buffer in module.named_buffers():
            self._buffers.append(_variable(name, buffer))

    def facts(self) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        return {
            "buffers": self._mode,
            "parameters that are not trained": signature(self._fixed),
            "buffers of the module": signature(self._buffers),
        }

    def broadcast(self, group: Group, what: str) -> None:
        """Set all of them to those of rank 0. Collective."""
        broadcast(group, [*self._fixed, *self._buffers], what)

    def sync(self, group: Group, what: str) -> None:
        """Average or broadcast the buffers. Collective."""
        averaged = [
            var
            for var in self._buffers
            if self._mode == AVERAGE and is_float(var.dtype)
        ]
        broadcast(group, [var for var in self._buffers if var not in averaged], what)
        if not averaged:
            return
        arrays = {var.name: var.value for var in averaged}
        with Reducer(Layout.of(arrays), group, f"{what}: buffers") as reducer:
            reducer.reduce(arrays, out=arrays)


def _variable(name: str, tensor: Any) -> Variable:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"{name!r} is {tensor.layout} on {tensor.device}; only dense tensors in "
            f"CPU memory can be used, others are not supported yet"
        )
    if tensor.dtype.is_complex:
        raise InvalidArgumentError(f"{name!r} is complex, which is not supported yet")
    array = array_of(tensor)
    # Variables have numbers.
    return Variable(array.view(np.uint8) if array.dtype == bool else array, name)

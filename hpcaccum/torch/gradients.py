"""The gradients of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcaccum.optimizers.slices import Gradient
from hpcaccum.rows import IndexedSlices
from hpcaccum.torch.rows import check_dense, gradient_of, slices_of
from hpcaccum.torch.tensors import array_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hpcaccum.dtypes import Array


class Gradients:
    """The gradients of parameters: their ``grad``, as tensors and as arrays.

    As in DistributedDataParallel, they stay in the memory in which PyTorch computes
    them: the exchange copies them from there, and `replace` copies the means back.

    Args:
        parameters: By name.
        sparse: Names of those whose gradients are sparse.
    """

    def __init__(self, parameters: Mapping[str, Any], sparse: Collection[str]) -> None:
        self._parameters, self._sparse = parameters, frozenset(sparse)
        self._names = {p: name for name, p in parameters.items()}
        self._hooks: dict[Any, Any] = {}

    def add_hooks(self, call: Callable[[Any], None]) -> None:
        """Have each gradient reported when a backward pass has computed it."""
        self._hooks = {each: _hook(each, call) for each in self._names}

    def remove_hooks(self) -> None:
        """Have no more gradients reported."""
        for hook in self._hooks.values():
            hook.remove()

    def name_of(self, parameter: Any) -> str:
        """Return the name of a parameter."""
        return self._names[parameter]

    def is_sparse(self, parameter: Any) -> bool:
        """Whether the gradients of a parameter are sparse."""
        return self._names[parameter] in self._sparse

    def is_final(self, parameter: Any) -> bool:
        """Whether a gradient that is reported is dense, and no hook comes after."""
        hook = self._hooks[parameter]
        last = next(reversed(hook.hooks_dict_ref()))
        return not self.is_sparse(parameter) and last == hook.id

    def dense(self, parameter: Any) -> tuple[str, Array]:
        """Return the name and the gradient of a parameter that is not sparse."""
        name = self._names[parameter]
        return name, _array(name, parameter.grad)

    def found(self) -> dict[str, Gradient]:
        """Return the gradients that there are, by name: arrays, or rows if sparse."""
        return {
            name: slices_of(name, parameter.grad)
            if name in self._sparse
            else _array(name, parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def replace(self, means: Mapping[str, Gradient]) -> None:
        """Replace gradients in CPU memory by means."""
        for name, mean in means.items():
            parameter = self._parameters[name]
            if isinstance(mean, IndexedSlices):
                parameter.grad = gradient_of(mean, parameter.dtype)
            else:
                np.copyto(array_of(parameter.grad), mean, casting="same_kind")

    def fill(self) -> frozenset[str]:
        """Set each ``grad`` that is None to zeros; return the names of these."""
        lacks = [name for name, p in self._parameters.items() if p.grad is None]
        for name in lacks:
            parameter = self._parameters[name].detach()
            if name in self._sparse:
                none = np.empty(0, np.int64)
                rows = IndexedSlices(array_of(parameter[:0]), none, parameter.shape)
                grad = gradient_of(rows, parameter.dtype)
            else:
                grad = torch.zeros_like(parameter)
            self._parameters[name].grad = grad
        return frozenset(lacks)

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Set each ``grad``, or those of some names, to None."""
        for name in self._parameters if names is None else names:
            self._parameters[name].grad = None


def _hook(parameter: Any, call: Callable[[Any], None]) -> Any:
    """Add a hook to a parameter, also if it is not trained yet; return its handle."""
    trained = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(trained)
    return handle


def _array(name: str, grad: Any) -> Array:
    check_dense(name, grad)
    return array_of(grad)

"""The gradients of parameters, and their place in the memory of an exchange."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcaccum.indexed_slices import IndexedSlices
from hpcaccum.optimizers.slices import Gradient
from hpcaccum.torch.rows import check_dense, gradient_of, slices_of
from hpcaccum.torch.tensors import array_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hpcaccum.dtypes import Array


class Gradients:
    """The gradients of parameters: their ``grad``, as tensors and as arrays.

    PyTorch computes each gradient in memory of its own. `move` copies it to the
    exchange, once, so that the pass may use that memory for the next one. `replace`
    puts the means into other memory, which is used again when nobody has a gradient in
    it any more. So a gradient that a program keeps does not change in the next pass.

    Gradients that were there before the pass, to which it has added, stay where they
    are. So do those of half precision, as the exchange has a wider dtype; those of
    parameters in another order, such as ``channels_last``, as optimizers may need that
    of the parameter; those that have a graph, of ``create_graph=True``; sparse
    gradients; and those on a device. The exchange copies them.

    Args:
        parameters: By name.
        sparse: Names of those whose gradients are sparse.
    """

    def __init__(self, parameters: Mapping[str, Any], sparse: Collection[str]) -> None:
        self._parameters, self._sparse = parameters, frozenset(sparse)
        self._names = {p: name for name, p in parameters.items()}
        # The memory of the exchange; as tensors, what has the dtype of the parameter.
        self._places: Mapping[str, Array] = {}
        self._tensors: dict[str, Any] = {}
        # Memory for means, and the array of which the last tensor in it was made.
        self._memory: dict[str, tuple[Array, weakref.ref[Array]]] = {}
        self._hooks: dict[Any, Any] = {}

    def add_hooks(self, call: Callable[[Any], None]) -> None:
        """Have each gradient reported when a backward pass has computed it."""
        self._hooks = {each: _hook(each, call) for each in self._names}

    def remove_hooks(self) -> None:
        """Have no more gradients reported."""
        for hook in self._hooks.values():
            hook.remove()

    def use(self, places: Mapping[str, Array]) -> None:
        """Let `move` use memory of the exchange, by name; empty if there is none."""
        first = next(iter(places), None)
        if first is None or self._places.get(first) is places[first]:
            return
        tensors = {name: tensor_of(place) for name, place in places.items()}
        self._places, self._tensors = (
            places,
            {
                name: tensor
                for name, tensor in tensors.items()
                if _is_alike(tensor, self._parameters[name])
            },
        )

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

    def move(self, parameter: Any) -> tuple[str, Array | None]:
        """Move a gradient, of a parameter that is not sparse, to its place.

        Returns:
            The name, and the gradient; None if it is in its place.
        """
        name = self._names[parameter]
        check_dense(name, parameter.grad)
        place, grad = self._tensors.get(name), parameter.grad
        # Not new, but changed in place, as PyTorch counts: the program may have it.
        if place is None or grad.requires_grad or (grad is not place and grad._version):
            return name, array_of(grad)
        if grad is not place:
            place.copy_(grad.detach())
            parameter.grad = place
        return name, None

    def found(self) -> dict[str, Gradient]:
        """Return the gradients that there are, by name: arrays, or rows if sparse."""
        return {
            name: slices_of(name, parameter.grad)
            if name in self._sparse
            else self._array(name, parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def _array(self, name: str, grad: Any) -> Array:
        check_dense(name, grad)
        moved = grad is self._tensors.get(name)
        return self._places[name] if moved else array_of(grad)

    def replace(self, means: Mapping[str, Gradient]) -> None:
        """Replace gradients in CPU memory by means; leave none in the exchange."""
        for name, parameter in self._parameters.items():
            mean, grad = means.get(name), parameter.grad
            if isinstance(mean, IndexedSlices):
                parameter.grad = gradient_of(mean, parameter.dtype)
            elif grad is not None and grad is self._tensors.get(name):
                own = self._unused(name)
                np.copyto(own, self._places[name] if mean is None else mean)
                parameter.grad = torch.from_numpy(own)
            elif mean is not None:
                np.copyto(array_of(grad), mean, casting="same_kind")

    def _unused(self, name: str) -> Array:
        """Return memory for a mean, of which nobody has a tensor."""
        memory, last = self._memory.get(name, (None, None))
        if memory is None or (last is not None and last() is not None):
            memory = np.empty_like(self._places[name])
        # Each tensor in it, and each view of one, keeps this array alive.
        array: Array = memory.view()
        self._memory[name] = memory, weakref.ref(array)
        return array

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


def _is_alike(place: Any, parameter: Any) -> bool:
    """Whether memory of the exchange has the dtype and the order of a parameter."""
    facts = [(each.dtype, each.stride()) for each in (place, parameter)]
    return facts[0] == facts[1]

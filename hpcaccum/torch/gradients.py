"""The gradients of parameters, and their place in the memory of an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.indexed_slices import IndexedSlices
from hpcaccum.optimizers.slices import Gradient
from hpcaccum.torch.rows import check_dense, gradient_of, slices_of
from hpcaccum.torch.tensors import array_of, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from hpcaccum.dtypes import Array


class Gradients:
    """The gradients of parameters: their ``grad``, as tensors and as arrays.

    PyTorch computes each gradient in memory of its own. `move` copies it to the
    exchange, once. From then on ``grad`` is the memory of the exchange: another
    backward pass, or clipping, changes it in place. Gradients of half precision stay
    where they are, as the exchange has a wider dtype. So do those of parameters in
    another order, such as ``channels_last``, as optimizers may need that of the
    parameter; those that have a graph, of ``create_graph=True``; sparse gradients; and
    those on a device. The exchange copies them.

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

    @property
    def has_places(self) -> bool:
        """Whether `move` has memory to use."""
        return bool(self._places)

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

        Raises:
            InvalidArgumentError: If it is sparse.
        """
        name = self._names[parameter]
        check_dense(name, parameter.grad)
        place = self._tensors.get(name)
        if place is None or parameter.grad.requires_grad:
            return name, array_of(parameter.grad)
        if parameter.grad is not place:
            place.copy_(parameter.grad.detach())
            parameter.grad = place
        return name, None

    def found(self) -> dict[str, Gradient]:
        """Return the gradients that there are, by name: arrays, or rows if sparse.

        Raises:
            InvalidArgumentError: If one is sparse that should not be, or the reverse.
        """
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
        """Replace gradients in CPU memory: those that are arrays in place."""
        for name, mean in means.items():
            parameter = self._parameters[name]
            if isinstance(mean, IndexedSlices):
                parameter.grad = gradient_of(mean, parameter.dtype)
            else:
                own = self._array(name, parameter.grad)
                np.copyto(own, mean, casting="same_kind")

    def give_up(self) -> None:
        """Leave the gradients to the exchange: each ``grad`` is None from now on."""
        self._places, self._tensors = {}, {}
        self.clear()

    def clear(self) -> None:
        """Set each ``grad`` to None."""
        for parameter in self._parameters.values():
            parameter.grad = None


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

"""The gradients of parameters, and their place in the memory of an exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.torch.tensors import array_of, check_dense, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Array = np.ndarray[Any, Any]


class Gradients:
    """The gradients of parameters: their ``grad``, as tensors and as arrays.

    PyTorch computes each gradient in memory of its own. `move` copies it to the
    exchange, once. From then on ``grad`` is the memory of the exchange: another
    backward pass, or clipping, changes it in place. Gradients of half precision stay
    where they are, as the exchange has a wider dtype.

    Args:
        parameters: By name.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._names = {p: name for name, p in parameters.items()}
        # The memory of the exchange; as tensors, what has the dtype of the parameter.
        self._places: Mapping[str, Array] = {}
        self._tensors: dict[str, Any] = {}

    def add_hooks(self, call: Callable[[Any], None]) -> list[Any]:
        """Have each gradient reported when a backward pass has computed it."""
        return [
            parameter.register_post_accumulate_grad_hook(call)
            for parameter in self._parameters.values()
            if parameter.requires_grad
        ]

    def use(self, places: Mapping[str, Array]) -> None:
        """Let `move` use memory of the exchange, by name."""
        first = next(iter(places))
        if self._places.get(first) is places[first]:
            return
        tensors = {name: tensor_of(place) for name, place in places.items()}
        self._places, self._tensors = (
            places,
            {
                name: tensor
                for name, tensor in tensors.items()
                if tensor.dtype == self._parameters[name].dtype
            },
        )

    @property
    def has_places(self) -> bool:
        """Whether `move` has memory to use."""
        return bool(self._places)

    def move(self, parameter: Any) -> tuple[str, Array | None]:
        """Move a gradient to its place.

        Returns:
            The name, and the gradient; None if it is in its place.

        Raises:
            InvalidArgumentError: If it is sparse.
        """
        name = self._names[parameter]
        check_dense(name, parameter.grad)
        place = self._tensors.get(name)
        if place is None:
            return name, array_of(parameter.grad)
        if parameter.grad is not place:
            place.copy_(parameter.grad.detach())
            parameter.grad = place
        return name, None

    def arrays(self) -> dict[str, Array]:
        """Return the gradients that there are, by name.

        Raises:
            InvalidArgumentError: If one is sparse.
        """
        found = {}
        for name, parameter in self._parameters.items():
            if (grad := parameter.grad) is not None:
                check_dense(name, grad)
                moved = grad is self._tensors.get(name)
                found[name] = self._places[name] if moved else array_of(grad)
        return found

    def give_up(self) -> None:
        """Leave the gradients to the exchange: each ``grad`` is None from now on."""
        self._places, self._tensors = {}, {}
        self.clear()

    def clear(self) -> None:
        """Set each ``grad`` to None."""
        for parameter in self._parameters.values():
            parameter.grad = None

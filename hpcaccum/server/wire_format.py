"""The wire format: named gradients and parameters as flat vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import copyto
from hpcaccum.layout import Layout
from hpcaccum.overlap import overlap, same_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcaccum.accumulator import Batch

Array = np.ndarray[Any, Any]

_PRESENT = "?present"


class WireFormat:
    """How gradients and parameters lie in the flat vectors that ranks exchange.

    A rank may lack the gradients of some variables. A vector of gradients therefore
    ends with one number per variable: 1 if the gradient is present, else 0. In a mean
    of such vectors, that number is the share of gradients that are present.

    Args:
        variables: Name to array.

    Attributes:
        parameters: Layout of a vector of parameters.
        gradients: Layout of a vector of gradients; begins like that of the parameters.
        dtypes: Dtypes of the variables, by name.
    """

    def __init__(self, variables: Mapping[str, Array]) -> None:
        self.parameters = Layout.of(variables)
        shapes = {**self.parameters.shapes, _PRESENT: (len(variables),)}
        self.gradients = Layout(shapes, self.parameters.dtype)
        self.dtypes = {name: array.dtype for name, array in variables.items()}

    @property
    def present(self) -> slice:
        """The place of the numbers in a vector of gradients."""
        return self.gradients.place(_PRESENT)

    def gradient_views(self, flat: Array) -> tuple[dict[str, Array], Array]:
        """Return the place of each gradient in a vector, and that of the numbers."""
        views = self.gradients.views(flat)
        present = views.pop(_PRESENT)
        return views, present

    def write_gradients(
        self,
        grads: Mapping[str, Array],
        flat: Array,
        *,
        clear: bool,
        send: Callable[[Mapping[str, Any], Array], None] | None = None,
    ) -> None:
        """Copy gradients to their places in a vector, unless they lie there already.

        Args:
            grads: Name to array; some may be missing.
            flat: The vector.
            clear: Whether to zero the places of those that are missing.
            send: Copies gradients of a device; may overwrite all of the vector.
        """
        views, present = self.gradient_views(flat)
        if send is None:
            _copy_gradients(grads, views, flat)
        else:
            send(grads, flat)
        present[:] = [name in grads for name in views]
        if clear:
            for name in views.keys() - grads.keys():
                views[name][...] = 0

    def is_complete(self, batch: Batch) -> bool:
        """Whether every vector of a batch on this node has all gradients."""
        present = self.present
        numbers = [view[present] for view in batch.views(present.stop)]
        # A vector may be the sum of several.
        return bool(numbers) and bool(np.all(sum(numbers) == batch.divisor))

    def read_gradients(self, flat: Array) -> dict[str, Array]:
        """Return the gradients that are present, as views of a vector.

        A mean was divided by the number of all vectors. A gradient that some of them
        lack is changed, in place, to the mean over those that have it.
        """
        views, present = self.gradient_views(flat)
        return present_gradients(views, present)

    def write_parameters(self, center: Mapping[str, Array], flat: Array) -> None:
        """Copy parameters to a vector."""
        for name, view in self.parameters.views(flat).items():
            view[...] = center[name]

    def read_parameters(self, flat: Array, into: Mapping[str, Array]) -> None:
        """Copy some of the parameters of a vector to arrays."""
        views = self.parameters.views(flat)
        for name, array in into.items():
            copyto(array, views[name])


def present_gradients(
    views: Mapping[str, Array], shares: Sequence[float] | Array
) -> dict[str, Array]:
    """Return the gradients that are present; see `WireFormat.read_gradients`.

    Args:
        views: Name to gradient, which may be changed.
        shares: For each, the share of the vectors that have it.
    """
    found = {}
    for (name, view), share in zip(views.items(), shares, strict=True):
        if share not in (0, 1):
            view /= share
        if share != 0:
            found[name] = view
    return found


def _copy_gradients(
    grads: Mapping[str, Array], places: Mapping[str, Array], flat: Array
) -> None:
    """Copy gradients to their places in a vector, unless they lie there already."""
    away = {
        name: array
        for name, array in grads.items()
        if not same_elements(array, places[name])
    }
    for name, array in away.items():
        # The place of another one may be overwritten before this one is read.
        if overlap(array, flat):
            away[name] = array.copy()
    for name, array in away.items():
        np.copyto(places[name], array, casting="same_kind")


def gradients_by_name(
    pairs: Sequence[tuple[Any, Any]],
) -> dict[str, Array]:
    """Return the gradients that are not None, by the name of their variable."""
    return {var.name: grad for grad, var in pairs if grad is not None}

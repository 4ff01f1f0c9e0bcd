"""The wire format: named gradients and parameters as flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcaccum.accumulator import Batch
from hpcaccum.device import copy_quietly
from hpcaccum.dtypes import Array, quiet
from hpcaccum.layout import Layout
from hpcaccum.overlap import overlap, same_elements
from hpcaccum.rows import (
    IndexedSlices,
    RowFormat,
    RowPlace,
    Rows,
    merged,
    sliced,
    weighted,
)
from hpcaccum.spans import traced

_PRESENT = "?present"
# Relative error of sums of weights in float32.
_EXACT = 1e-6
_NONE: Mapping[str, int] = MappingProxyType({})


class WireFormat:
    """How gradients and parameters lie in the flat vectors that ranks exchange.

    A rank may lack the gradients of some variables. After the gradients, a vector
    therefore has one number per variable: 1 if the gradient is present, else 0. In a
    mean of such vectors, that number is the share of gradients that are present, with
    their weights.

    The gradients of sparse variables are rows, which follow these numbers;
    ``capacities`` are the maximum numbers of these rows, by name.

    Attributes:
        parameters: Layout of a vector of parameters.
        gradients: Layout of a vector of gradients, without its rows; begins like that
            of the parameters if no variable is sparse.
        present: The place of the numbers in a vector of gradients.
        rows: The places of rows in a vector of gradients.
        size: Elements of a vector of gradients.
    """

    def __init__(
        self,
        parameters: Layout,
        dtypes: Mapping[str, np.dtype[Any]],
        capacities: Mapping[str, int] = _NONE,
    ) -> None:
        self.parameters, self.dtypes = parameters, dtypes
        shapes = parameters.shapes
        arrays = {name: shapes[name] for name in shapes if name not in capacities}
        arrays[_PRESENT] = (len(shapes),)
        self.gradients = Layout(arrays, parameters.dtype)
        self.present = self.gradients.place(_PRESENT)
        self.rows: list[RowPlace] = []
        self.size = self.gradients.size
        for name, capacity in capacities.items():
            form = RowFormat(capacity, math.prod(shapes[name][1:]), parameters.dtype)
            self.rows.append(RowPlace(name, self.size, form))
            self.size = self.rows[-1].end

    @classmethod
    def of(
        cls, variables: Mapping[str, Array], capacities: Mapping[str, int] = _NONE
    ) -> WireFormat:
        """Return that of some variables, by name."""
        dtypes = {name: array.dtype for name, array in variables.items()}
        return cls(Layout.of(variables), dtypes, capacities)

    def gradient_views(self, flat: Array) -> tuple[dict[str, Array], Array]:
        """Return the place of each array in a vector, and that of the numbers."""
        views = self.gradients.views(flat)
        present = views.pop(_PRESENT)
        return views, present

    @traced("copy")
    def write_gradients(
        self,
        grads: Mapping[str, Array | Rows],
        flat: Array,
        *,
        clear: bool,
        send: Callable[[Mapping[str, Any], Array], None] | None = None,
    ) -> None:
        """Copy gradients to their places in a vector, unless they lie there already."""
        views, present = self.gradient_views(flat)
        # Before the arrays are written: the values of rows may lie in their places.
        rows: Mapping[str, Any] = grads
        for place in self.rows:
            place.write(flat, rows.get(place.name))
        arrays: dict[str, Any] = {n: grads[n] for n in views if n in grads}
        if send is None:
            _copy_gradients(arrays, views, flat)
        else:
            send(arrays, flat)
        if grads.keys() == self.dtypes.keys():
            present[:] = 1
            return
        present[:] = [name in grads for name in self.parameters]
        if clear:
            for name in views.keys() - grads.keys():
                views[name][...] = 0

    def read_rows(
        self,
        rows: Mapping[str, Sequence[Rows]],
        total: Array,
        divisor: float,
        factor: float,
    ) -> dict[str, IndexedSlices]:
        """Return the gradients of sparse variables: means, times a factor."""
        shares = dict(zip(self.parameters, self.gradient_views(total)[1], strict=True))
        found = {}
        for name, parts in rows.items():
            if shares[name]:
                weight = _unrounded(float(shares[name]) * divisor)
                mean = merged(parts)
                with quiet():
                    if weight != 1:
                        mean = mean._replace(values=mean.values / weight)
                    mean = weighted(mean, factor)
                found[name] = sliced(mean, self.parameters.shapes[name])
        return found

    def is_complete(self, batch: Batch) -> bool:
        """Whether every vector of a batch on this node has all gradients."""
        if not batch.places:
            return False
        total, present = np.float64(0), self.present
        for view, factor in zip(batch.views(present.stop), batch.factors, strict=True):
            total = total + view[present] * factor
        # Its weights may not be exact.
        return bool(total.min() >= (1 - _EXACT) * batch.divisor)

    def read_gradients(self, flat: Array) -> dict[str, Array]:
        """Return the arrays that are present, as views of a vector.

        A mean was divided by the number of all vectors. A gradient that some of them
        lack is changed, in place, to the mean over those that have it.
        """
        views, present = self.gradient_views(flat)
        found = {}
        for name, share in zip(self.parameters, present, strict=True):
            if share != 0 and name in views:
                found[name] = view = views[name]
                if share != 1:
                    view /= share
        return found


def _unrounded(weight: float) -> float:
    """Return a sum of weights that a share has given, exact if it is whole."""
    whole = round(weight)
    return whole if math.isclose(weight, whole, rel_tol=_EXACT) else weight


def _copy_gradients(
    grads: Mapping[str, Array], places: Mapping[str, Array], flat: Array
) -> None:
    away = {}
    for name, array in grads.items():
        if not overlap(array, flat):
            away[name] = array
        elif not same_elements(array, places[name]):
            # The place of another one may be overwritten before this one is read.
            away[name] = array.copy()
    for name, array in away.items():
        copy_quietly(places[name], array)

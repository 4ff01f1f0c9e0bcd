"""How the variables of a center are divided among servers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.layout import ALIGNMENT
from hpcaccum.server.wire_format import present_gradients

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.layout import Layout
    from hpcaccum.server.wire_format import WireFormat


def cut(layout: Layout, count: int, *, elementwise: bool) -> list[slice]:
    """Divide a vector of parameters into consecutive parts of about the same size."""
    step = ALIGNMENT // layout.dtype.itemsize
    wanted = [number * layout.size / count for number in range(1, count)]
    if elementwise:
        ends = [round(each / step) * step for each in wanted]
    else:
        allowed = [*layout.offsets.values(), layout.size]
        ends = [min(allowed, key=lambda end: abs(end - each)) for each in wanted]
    bounds = [0, *ends, layout.size]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


class Shard:
    """The part of one server: of some variables, or of each variable some elements.

    Args:
        wire: Of all variables.
        part: Of the vector of parameters.
        elementwise: Whether a part may begin within a variable. Its arrays are vectors
            then, one for each variable, of which some may be empty. If not, it has
            whole variables.

    Attributes:
        part: Of the vector of parameters, and of that of gradients.
        ranges: Of the vector of gradients: the part, and the numbers that say which
            gradients are present.
        size: Elements of these ranges.
    """

    def __init__(self, wire: WireFormat, part: slice, *, elementwise: bool) -> None:
        self.part, self.ranges = part, [part, wire.present]
        self._elementwise = elementwise
        self.size = sum(each.stop - each.start for each in self.ranges)
        self._length = part.stop - part.start
        self._dtypes = wire.dtypes
        # Of each variable: the place in the part, and the shape; the place in itself.
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._within: dict[str, slice] = {}
        # The places of these variables among all.
        self._numbers: list[int] = []
        for number, name in enumerate(wire.parameters):
            place, shape = wire.parameters.place(name), wire.parameters.shapes[name]
            begin = min(max(place.start, part.start), part.stop)
            end = max(min(place.stop, part.stop), begin)
            if elementwise or (begin < end and math.prod(shape)):
                there = slice(begin - part.start, end - part.start)
                self._places[name] = there, (end - begin,) if elementwise else shape
                self._within[name] = slice(begin - place.start, end - place.start)
                self._numbers.append(number)

    @property
    def names(self) -> Collection[str]:
        """The variables of which it has elements, or could have."""
        return self._places.keys()

    def pieces(self, name: str, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of this shard of arrays that are divided as a variable is."""
        if name not in self._places:
            return {}
        if not self._elementwise:
            return dict(whole)
        within, (_, shape) = self._within[name], self._places[name]
        return {
            key: value
            if isinstance(value, int)
            else np.asarray(value).reshape(-1)[within].reshape(shape)
            for key, value in whole.items()
        }

    def arrays(self, flat: Array) -> dict[str, Array]:
        """Return the parameters in the memory of the part, in arrays of their own."""
        return {
            name: view.astype(self._dtypes[name])
            for name, view in self._views(flat).items()
        }

    def read_gradients(self, flat: Array) -> dict[str, Array]:
        """Return the gradients that are present in the `ranges` of a vector.

        As `WireFormat.read_gradients`; they are views.
        """
        present = flat[self._length :]
        return present_gradients(self._views(flat), present[self._numbers])

    def write_parameters(self, center: Mapping[str, Array], flat: Array) -> None:
        """Copy the parameters of this shard to the memory of its part."""
        for name, view in self._views(flat).items():
            view[...] = center[name]

    def _views(self, flat: Array) -> dict[str, Array]:
        return {
            name: flat[there].reshape(shape)
            for name, (there, shape) in self._places.items()
        }


@dataclass
class Server:
    """The memory of one of several servers, which all ranks of its node have mapped.

    Attributes:
        number: Its place among the servers.
        shard: Its part of the center.
        part: The parameters of this part.
        gradients: Those of its next updates, shape (buffers, elements). Those of a step
            have the place of its number modulo ``buffers``.
    """

    number: int
    shard: Shard
    part: Array
    gradients: Array


def joined(pieces: Sequence[Array | None], shape: tuple[int, ...]) -> Array | None:
    """Return an array whose elements, or all of it, are with several servers."""
    found = [piece for piece in pieces if piece is not None]
    return np.concatenate([*map(np.ravel, found)]).reshape(shape) if found else None

"""What servers have of the center: one has all of it, several a part each."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.layout import ALIGNMENT
from hpcaccum.server.wire_format import present_gradients

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpcaccum.accumulator import Batch
    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array
    from hpcaccum.layout import Layout
    from hpcaccum.server.double_buffer import DoubleBuffer
    from hpcaccum.server.parameter_copies import Copier
    from hpcaccum.server.wire_format import WireFormat


class Order(NamedTuple):
    """An update that the root has ordered from a server of several.

    Attributes:
        step: The step that it follows.
        buffer: Which gradients make it; None for none.
        factor: See `Batch`.
    """

    step: int
    buffer: int | None
    factor: float


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


class Part:
    """The part of one of several servers: some variables, or some elements of each.

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
        # By variable: its place in the part and its shape; its place in itself.
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
        """Return what this part has of arrays that are divided as a variable is."""
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
        """Copy the parameters of this part to its memory."""
        for name, view in self._views(flat).items():
            view[...] = center[name]

    def _views(self, flat: Array) -> dict[str, Array]:
        return {
            name: flat[there].reshape(shape)
            for name, (there, shape) in self._places.items()
        }


class OwnPart:
    """The part of the center that this server, one of several, has.

    Args:
        part: Which one.
        gradients: Of its next updates, shape (buffers, elements).
        first: Its first values.

    Attributes:
        center: Name to array.
    """

    def __init__(self, part: Part, gradients: Array, first: Array) -> None:
        self._part, self._gradients = part, gradients
        self.center = part.arrays(first)

    def is_complete(self, order: Order) -> bool:
        """Whether all ranks can help to update it; they cannot."""
        return False

    def read(self, order: Order, deadline: Deadline) -> dict[str, Any]:
        """Return the gradients that are present."""
        if order.buffer is None:
            return {}
        return self._part.read_gradients(self._gradients[order.buffer])

    def note(self, grads: Mapping[str, Any]) -> None:
        """Note what gradients will change; no variable is sparse."""

    def assign(self, values: Mapping[str, Array]) -> None:
        """Set it to the values of all variables."""
        for name, array in self.center.items():
            array[...] = self._part.pieces(name, {name: values[name]})[name]

    def write(self, flat: Array) -> None:
        """Copy it to where it is published."""
        self._part.write_parameters(self.center, flat)

    def free(self) -> None:
        """Release the memory of gradients; the center stays."""
        self._gradients = self._gradients[:0].copy()


class WholeCenter:
    """The center of a single server, with the interface of `OwnPart`.

    Args:
        wire: How gradients lie in flat vectors.
        copier: Copies parameters to such vectors.
        copies: These vectors.
        center: Name to array.
        threads: To use for sums.
    """

    def __init__(
        self,
        wire: WireFormat,
        copier: Copier,
        copies: DoubleBuffer,
        center: dict[str, Array],
        threads: int,
    ) -> None:
        self._wire, self._copier, self._copies = wire, copier, copies
        self.center, self._threads = center, threads
        # The memory of each sum, allocated once.
        self._sum: Array | None = None

    def is_complete(self, batch: Batch) -> bool:
        """Whether every vector of a batch on this node has all gradients."""
        return self._wire.is_complete(batch)

    def read(self, batch: Batch, deadline: Deadline) -> dict[str, Any]:
        """Return the means of the gradients that are present."""
        # There is no gradient if its rank was admitted and then failed to write.
        if not batch.places:
            return {}
        # Before the mean, which overwrites memory that they need.
        parts = {p.name: batch.rows(p, deadline) for p in self._wire.rows}
        mean = self._mean(batch, deadline)
        rows = self._wire.read_rows(parts, mean, batch.divisor) if parts else {}
        return {**self._wire.read_gradients(mean), **rows}

    def _mean(self, batch: Batch, deadline: Deadline) -> Array:
        """Return the mean of the arrays of a batch, which may be changed."""
        size = self._wire.gradients.size
        if not batch.is_local:
            return batch.collect(size, deadline)
        if len(batch.places) == 1 and batch.divisor == 1:
            # Every variable has one gradient or none, so nothing is changed.
            return batch.views(size)[0]
        if self._sum is None:
            self._sum = np.empty(size, batch.dtype)
        with np.errstate(all="ignore"):
            batch.total(self._sum, deadline, self._threads)
        return self._sum

    def note(self, grads: Mapping[str, Any]) -> None:
        """Note which rows of sparse variables gradients will change."""
        rows = {p.name: grads[p.name] for p in self._wire.rows if p.name in grads}
        self._copier.note({name: each.indices for name, each in rows.items()})

    def assign(self, values: Mapping[str, Array]) -> None:
        """Set it to the values of all variables."""
        rows = [place.name for place in self._wire.rows]
        self._copier.note({name: np.arange(len(self.center[name])) for name in rows})
        for name, array in values.items():
            np.copyto(self.center[name], array)

    def write(self, flat: Array) -> None:
        """Copy it to where it is published."""
        self._copier.write(self.center, flat, self._copies.writing)


def joined(pieces: Sequence[Array | None], shape: tuple[int, ...]) -> Array | None:
    """Return an array whose elements, or all of it, are with several servers."""
    found = [piece for piece in pieces if piece is not None]
    return np.concatenate([*map(np.ravel, found)]).reshape(shape) if found else None

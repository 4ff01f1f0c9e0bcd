"""What servers have of the center: one has all of it, several a part each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.accumulator import Batch
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array, quiet
from hpcaccum.layout import ALIGNMENT, Layout
from hpcaccum.nodes import Place
from hpcaccum.server.double_buffer import DoubleBuffer, step_of, version_of
from hpcaccum.server.parameter_copies import Copier
from hpcaccum.server.wire_format import WireFormat


class Order(NamedTuple):
    """An update that the root orders from all of several servers.

    Attributes:
        version: Of the parameters, which they make.
        places: Of the gradients that make it; it may be empty.
        divisor, factor: See `Batch`.
        rate: The learning rate; None for the optimizer's own.
        mean: On a server, its part of the mean of the gradients, if there are any.
    """

    version: int
    places: Sequence[Place] = ()
    divisor: float = 1.0
    factor: float = 1.0
    rate: float | None = None
    mean: Array | None = None

    @property
    def step(self) -> int:
        """The step that it follows."""
        return step_of(self.version) - 1

    @property
    def assigns(self) -> bool:
        """Whether the version has values that were assigned, and no update."""
        return self.version != version_of(step_of(self.version))


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

    If ``elementwise``, it may begin within a variable. Its arrays are vectors then, one
    for each variable, of which some may be empty.

    Attributes:
        part: Of the vector of parameters, and of that of gradients.
        within: Which elements it has of each of its variables.
        ranges: Of the vector of gradients: the part, and the numbers that say which
            of its gradients are present.
        wire: How its variables lie in these ranges, and in the part.
    """

    def __init__(self, wire: WireFormat, part: slice, *, elementwise: bool) -> None:
        self.part, self._elementwise = part, elementwise
        self.within: dict[str, slice] = {}
        shapes, numbers = {}, []
        for number, name in enumerate(wire.parameters):
            place = wire.parameters.place(name)
            if elementwise or part.start <= place.start < part.stop:
                begin = min(max(place.start, part.start), part.stop)
                end = max(min(place.stop, part.stop), begin)
                self.within[name] = slice(begin - place.start, end - place.start)
                whole = wire.parameters.shapes[name]
                shapes[name] = (end - begin,) if elementwise else whole
                numbers.append(wire.present.start + number)
        # They follow each other.
        present = slice(numbers[0], numbers[-1] + 1) if numbers else slice(0, 0)
        self.ranges = [part, present]
        dtypes = {name: wire.dtypes[name] for name in shapes}
        self.wire = WireFormat(Layout(shapes, wire.parameters.dtype), dtypes)

    def piece(self, name: str, whole: Any) -> Array:
        """Return what this part has of an array that is divided as a variable is."""
        array: Array = np.asarray(whole)
        return array.reshape(-1)[self.within[name]] if self._elementwise else array

    def pieces(self, name: str, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this part has of arrays, and all integers."""
        return {
            key: value if isinstance(value, int) else self.piece(name, value)
            for key, value in whole.items()
        }


class Center:
    """The center, or the part of it that one of several servers has.

    ``copier`` copies ``arrays`` to ``copies``, and ``wire`` is their format. Sums use
    so many ``threads``.
    """

    def __init__(
        self,
        wire: WireFormat,
        copier: Copier,
        copies: DoubleBuffer,
        arrays: dict[str, Array],
        threads: int = 1,
    ) -> None:
        self.wire, self._copier, self._copies = wire, copier, copies
        self.arrays, self._threads = arrays, threads
        self._sum: Array | None = None

    def read(self, batch: Any, deadline: Deadline) -> dict[str, Any]:
        """Return the means of the gradients that are present, times their factor."""
        # Before the mean, which overwrites memory that they need.
        parts = {p.name: batch.rows(p, deadline) for p in self.wire.rows}
        mean, rows = self._mean(batch, deadline), {}
        # There is no gradient if its rank was admitted and then failed to write.
        if mean is None:
            return {}
        if parts:
            rows = self.wire.read_rows(parts, mean, batch.divisor, batch.factor)
        if batch.factor != 1:
            mean = self._scaled(mean, batch.factor)
        return {**self.wire.read_gradients(mean), **rows}

    def _mean(self, batch: Batch | Order, deadline: Deadline) -> Array | None:
        """Return the mean of the arrays of a batch, which may be changed."""
        size = self.wire.gradients.size
        if isinstance(batch, Order):
            return batch.mean
        if not batch.places:
            return None
        if not batch.is_local:
            return batch.collect(size, deadline)
        if len(batch.places) == 1 and batch.divisor == 1:
            # Every variable has one gradient or none, so nothing is changed.
            return batch.views(size)[0]
        with quiet():
            batch.total(self._room(batch.dtype), deadline, self._threads)
        return self._room(batch.dtype)

    def _scaled(self, mean: Array, factor: float) -> Array:
        """Return a mean times its factor; a rank may still read the mean itself."""
        scaled, arrays = self._room(mean.dtype)[: mean.size], self.wire.present.start
        np.copyto(scaled, mean)
        with quiet():
            scaled[:arrays] *= mean.dtype.type(factor)
        return scaled

    def _room(self, dtype: np.dtype[Any]) -> Array:
        """Return memory for a vector of gradients, allocated once."""
        if self._sum is None:
            self._sum = np.empty(self.wire.gradients.size, dtype)
        return self._sum

    def note(self, grads: Mapping[str, Any]) -> None:
        """Note which rows of sparse variables gradients will change."""
        rows = {p.name: grads[p.name] for p in self.wire.rows if p.name in grads}
        self._copier.note({name: each.indices for name, each in rows.items()})

    def assign(self, values: Mapping[str, Array]) -> None:
        """Set it to values, one for each array."""
        rows = [place.name for place in self.wire.rows]
        self._copier.note({name: np.arange(len(self.arrays[name])) for name in rows})
        for name, array in self.arrays.items():
            np.copyto(array, values[name])

    def write(self, flat: Array) -> None:
        """Copy it to where it is published."""
        self._copier.write(self.arrays, flat, self._copies.writing)


def joined(pieces: Sequence[Array | None], shape: tuple[int, ...]) -> Array | None:
    """Return an array whose elements, or all of it, are with several servers."""
    found = [piece for piece in pieces if piece is not None]
    return np.concatenate([*map(np.ravel, found)]).reshape(shape) if found else None

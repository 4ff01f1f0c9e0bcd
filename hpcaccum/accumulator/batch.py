"""Gradients that are summed together, where they lie."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.nodes import NodeParts, Place
from hpcaccum.rows import RowPlace, Rows, weighted
from hpcaccum.summation import add_in_order

# A take that may not wait for gradients must still get those of other nodes.
_LEAST_SECONDS = 60.0
# Bytes that are fetched from another node before the number of rows is known. Small
# gradients need no more.
_FIRST = 1 << 14
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class Batch:
    """Gradients that are summed together: vectors in `NodeParts`.

    Attributes:
        parts: Where they lie.
        places: Of each vector, in rank order; may be empty.
        dtype: Of the vectors.
        divisor: Of their sum.
        step: At which the vectors were admitted; -1 if it has no meaning.
        copied: The ranks of which the agent of the host's node has copies.
        factor: What a server multiplies their mean by; sums do not contain it.
    """

    parts: NodeParts
    places: Sequence[Place]
    dtype: np.dtype[Any]
    divisor: float
    step: int = -1
    copied: Collection[int] = ()
    factor: float = 1.0

    @property
    def is_local(self) -> bool:
        """Whether all vectors lie on this node."""
        parts = self.parts
        return parts.mapped or all(parts.is_here(each.rank) for each in self.places)

    @property
    def factors(self) -> list[float]:
        """The weight of each vector, by which it is multiplied in the sum."""
        return [place.factor for place in self.places]

    def views(self, count: int) -> list[Array]:
        """Return the first elements of the vectors, which must lie on this node."""
        return [self.parts.view(place, count, self.dtype) for place in self.places]

    def total(self, out: Array, deadline: Deadline, threads: int) -> None:
        """Set ``out`` to the weighted sum of the vectors, divided by `divisor`."""
        if self.parts.mapped or self.is_local:
            parts = self.views(out.size)
            add_in_order(parts, out, self.divisor, threads, self.factors)
        else:
            add_in_order([self.collect(out.size, deadline)], out, 1, threads)

    def collect(self, count: int, deadline: Deadline) -> Array:
        """Return the weighted sum, divided by `divisor`; between nodes only.

        It is memory of this node, valid until one of its ranks collects the next sum.
        """
        longer = Deadline(max(deadline.remaining, _LEAST_SECONDS), deadline.what)
        return self.parts.sum(
            self.places, count, self.dtype, self.divisor, longer, self.copied
        )

    def rows(self, place: RowPlace, deadline: Deadline) -> list[Rows]:
        """Return the rows at a place of each vector, times its factor.

        If that is 1, those on this node share memory with the vectors. From others,
        those that are there are copied, whatever the capacity.
        """
        buffers = [self._buffer(vector, place, deadline) for vector in self.places]
        return [*map(weighted, map(place.read, buffers), self.factors)]

    def _buffer(self, vector: Place, place: RowPlace, deadline: Deadline) -> Array:
        rank, offset, _ = vector
        begin = offset + place.begin * self.dtype.itemsize
        nbytes = (place.end - place.begin) * self.dtype.itemsize
        if self.parts.is_here(rank):
            return self.parts.view(Place(rank, begin), nbytes, _BYTES)

        def fetch(begin: int, nbytes: int) -> Array:
            one = Batch(self.parts, [Place(rank, begin)], _BYTES, 1)
            return np.array(one.collect(nbytes, deadline))

        first = fetch(begin, min(_FIRST, nbytes))
        used = place.used(first)
        if used <= first.size:
            return first
        more = fetch(begin + first.size, used - first.size)
        return np.concatenate([first, more])

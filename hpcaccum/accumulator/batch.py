"""Gradients that are summed together, where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.nodes import NodeParts, Place

Array = np.ndarray[Any, Any]

# A take that may not wait for gradients must still get those of other nodes.
_LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class Batch:
    """Vectors in parts of nodes, whose sum is wanted.

    Attributes:
        parts: Where they lie.
        places: Of each vector, in rank order; may be empty.
        dtype: Of the vectors.
        divisor: Of their sum.
    """

    parts: NodeParts
    places: Sequence[Place]
    dtype: np.dtype[Any]
    divisor: int

    @property
    def is_local(self) -> bool:
        """Whether all vectors lie on this node."""
        return all(self.parts.is_here(rank) for rank, _ in self.places)

    def views(self, count: int) -> list[Array]:
        """Return the first elements of the vectors, which must lie on this node."""
        return [self.parts.view(place, count, self.dtype) for place in self.places]

    def total(self, out: Array, deadline: Deadline, threads: int) -> None:
        """Set ``out`` to the sum of the vectors, divided by `divisor`.

        If all lie on this node, every vector is read once and ``out`` written once.

        Args:
            out: A vector of their length, of any dtype.
            deadline: Of the call. Other nodes have a minute, also if less is left.
            threads: See `add_in_order`.

        Raises:
            WaitTimeoutError: If other nodes do not send their sums in time.
        """
        if self.is_local:
            add_in_order(self.views(out.size), out, self.divisor, threads)
            return
        add_in_order([self.collect(out.size, deadline)], out, 1, threads)

    def collect(self, count: int, deadline: Deadline) -> Array:
        """Return the sum of the vectors, divided by `divisor`; between nodes only.

        Args:
            count: Elements of each vector.
            deadline: As for `total`.

        Returns:
            Memory of this node, valid until one of its ranks collects the next sum.

        Raises:
            WaitTimeoutError: As `total`.
        """
        longer = Deadline(max(deadline.remaining, _LEAST_SECONDS), deadline.what)
        return self.parts.sum(self.places, count, self.dtype, self.divisor, longer)

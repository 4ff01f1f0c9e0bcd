"""VectorAccumulator: a ConditionalAccumulator of vectors, parts of which are rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator.conditional import ConditionalAccumulator
from hpcaccum.accumulator.settings import check_settings
from hpcaccum.accumulator.state import Packing
from hpcaccum.accumulator.storage import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcaccum.mpi import Group
    from hpcaccum.row_buffers import RowPlace


class VectorAccumulator(ConditionalAccumulator):
    """Accumulates vectors, if they are not stale; for a parameter server. Collective.

    `take_batch` takes them. Those with rows have no other take, as their rows cannot be
    added element by element.

    Args:
        group: The ranks, all with the same arguments.
        host: The rank that holds the step.
        size, dtype: Of a vector.
        workers: How many ranks contribute vectors.
        rows: The places of rows in a vector, at its end.

    Attributes:
        most: Maximum number of vectors in one round.
    """

    most = Packing(shaped=False).max_count

    def __init__(
        self,
        group: Group,
        host: int,
        size: int,
        dtype: Any,
        workers: int,
        rows: Sequence[RowPlace],
    ) -> None:
        settings = check_settings(
            dtype=dtype,
            shape=(size,),
            shared_name=None,
            reduction=None,
            host=host,
            capacity=None,
            storage=Slots.name,
            workers=workers,
            size=group.size,
        )
        settings = dataclasses.replace(settings, rows=tuple(rows))
        self._attach(group, "gradients", settings)

    def exclude(self, ranks: Iterable[int]) -> None:
        """Name ranks in no message: they are not among the workers."""
        self._protocol.membership.exclude(ranks)

"""VectorAccumulator: a ConditionalAccumulator of vectors, parts of which are rows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator.conditional import ConditionalAccumulator
from hpcaccum.accumulator.settings import SLOTS, Settings
from hpcaccum.accumulator.state import Packing
from hpcaccum.accumulator.storage import Buffers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.accumulator.batch import Batch
    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group
    from hpcaccum.rows import RowPlace


class VectorAccumulator(ConditionalAccumulator):
    """Accumulates vectors, if they are not stale; for a parameter server. Collective.

    A vector that is one step late is added with its weight times ``late``; it is stale
    if that is 0. `batch` takes all vectors. Those with rows, which lie at the places
    ``rows`` at their end, have no other take, as their rows cannot be added element by
    element.

    Attributes:
        most: Maximum number of vectors in one round.
        most_first_step: Maximum step that can be set.
        parts: The memory of all buffers.
        membership: Which ranks have left.
    """

    most = Packing(shaped=False).max_count
    most_first_step = Packing(shaped=False).max_first_step

    def __init__(
        self,
        group: Group,
        host: int,
        size: int,
        dtype: Any,
        workers: int,
        rows: Sequence[RowPlace],
        what: str,
        late: float = 0.0,
    ) -> None:
        kind = np.dtype(dtype)
        settings = Settings(
            kind, (size,), "", "MEAN", host, size, SLOTS, workers, 0, rows, late
        )
        self._attach(group, what, settings)
        assert isinstance(self._storage, Buffers)
        self._buffers, self.parts = self._storage, self._storage.parts
        self.membership = self._protocol.membership

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        self.membership.check_present("apply")

    def pin(self) -> None:
        """Pin this rank's buffers, so that the CUDA device copies to them directly."""
        self._check_open()
        self._buffers.pin()

    def note_finished(self, step: int) -> None:
        """Note that the takes of all rounds of steps below ``step`` have returned.

        A rank that knows it may get its next slot without a round trip.
        """
        self._check_open()
        self._shared.writer.note_finished(step)

    @contextlib.contextmanager
    def batch(self, num_required: int, deadline: Deadline) -> Iterator[Batch]:
        """Do as `take_grad`, but give the vectors where they lie to a block.

        They stay as they are until its end. If it raises, the next call may give the
        same vectors again. If all were given up, it gets none: ranks may know the next
        step by then.
        """
        self._check_open()
        required = self._required(num_required)
        with self._shared.hold_round(required, deadline, empty=True) as closed:
            yield self._buffers.batch(closed, self._divisor(closed))

    def count_nonfinite(self) -> None:
        """Count a vector of this rank that is not finite, and was not applied."""
        self._check_open()
        self._protocol.counters.count_nonfinite(self._shared.group.rank)

    def lacks(self, num_required: int, step: int) -> str | None:
        """Return what a take at a step still waits for, for messages; None if nothing.

        Any rank may call it.
        """
        return self._protocol.awaited(num_required, step)

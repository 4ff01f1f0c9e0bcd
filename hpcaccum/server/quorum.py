"""The inbox of synchronous updates: the mean of a quorum of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpcaccum.accumulator import (
    Batch,
    Buffers,
    Packing,
    Receipt,
    Settings,
    SharedAccumulator,
)
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.mpi import Group
from hpcaccum.rows import RowPlace

_PACKING = Packing(shaped=False)


class QuorumInbox(SharedAccumulator):
    """Admits gradients of the current step; passes on those of a quorum. Collective.

    Gradients are vectors. Their rows, at the places ``rows``, lie at their end. The
    root gives gradients unless there are fewer ``workers`` than ranks. ``late`` is the
    factor of a gradient of the step before; 0 if it is dropped.
    """

    adds = True
    # The most gradients of one update, and the highest step that can be set.
    most, most_first_step = _PACKING.max_count, _PACKING.max_first_step

    def __init__(
        self,
        group: Group,
        root: int,
        size: int,
        dtype: Any,
        quorum: int,
        workers: int,
        rows: Sequence[RowPlace],
        what: str,
        late: float,
    ) -> None:
        self._shape = (size,)
        settings = Settings(
            np.dtype(dtype),
            self._shape,
            host=root,
            capacity=size,
            workers=workers,
            rows=rows,
            late=late,
        )
        super().__init__(group, settings, what)
        assert isinstance(self.storage, Buffers)
        self._buffers, self.parts = self.storage, self.storage.parts
        self.membership = self.protocol.membership
        self.counters = self.protocol.counters
        self._quorum, self.needs_all = quorum, quorum == workers
        self._buffer: Array | None = None

    @property
    def global_step(self) -> int:
        """The step of the gradients that are admitted now."""
        return self.protocol.state().step

    def set_global_step(self, step: int) -> None:
        """Set the step."""
        self.protocol.set_step(step)

    def buffer(self, known: int = 0) -> Array:
        """Return memory for the next gradient of this rank, which has ``known``."""
        # The server takes one round after the other, and publishes a step before the
        # take of its round returns.
        self.writer.note_finished(known - 1)
        deadline = Deadline(None, f"{self._what}: slot")
        self._buffer = self.writer.slot(self._shape, deadline)
        return self._buffer

    def submit(self, local_step: int, weight: float = 1.0) -> Receipt:
        """Submit the gradient in the buffer, unless it is stale."""
        assert self._buffer is not None
        return self.writer.submit(self._buffer, local_step, weight)

    def useful(self, step: int) -> int:
        """Return the least step whose parameters are worth computing with at a step."""
        return step

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Batch]:
        """Wait for the quorum that makes step ``step + 1``; the root only.

        If all gradients were given up, it gets none: ranks may know the next step by
        then.
        """
        with self.hold_round(self._quorum, deadline, empty=True) as closed:
            yield self._buffers.batch(closed)

    def following(self, step: int) -> Batch | None:
        """Return None: more gradients may be admitted until `next`."""
        return None

    def awaited(self, step: int) -> str | None:
        """Return what the mean of a step lacks; None if it is complete."""
        return self.protocol.awaited(self._quorum, step)

    def _free(self) -> None:
        self._buffer = None
        super()._free()

"""The inbox of synchronous updates: the mean of a quorum of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.accumulator import VectorAccumulator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from hpcaccum.accumulator import Batch, Receipt, Tally
    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.rows import RowPlace


class QuorumInbox(VectorAccumulator):
    """Admits gradients of the current step; passes on those of a quorum. Collective.

    Args:
        group, root, size, dtype, workers, rows, what: See `VectorAccumulator`.
        quorum: Gradients of one update, at least.
        late: Factor of a gradient of the step before; 0 if it is dropped.
    """

    adds = True

    def __init__(
        self,
        group: Group,
        root: int,
        size: int,
        dtype: Any,
        quorum: int,
        workers: int,
        rows: Sequence[RowPlace] = (),
        what: str = "gradients",
        late: float = 0.0,
    ) -> None:
        super().__init__(group, root, size, dtype, workers, rows, what, late)
        self._quorum, self.needs_all = quorum, quorum == workers
        self._buffer: Array | None = None

    def buffer(self, known: int = 0) -> Array:
        """Return the memory for this rank's next gradient.

        This rank has the parameters of the step ``known``; it may spare a round trip.
        """
        # The server takes one round after the other, and publishes a step before the
        # take of its round returns.
        self.note_finished(known - 1)
        self._buffer = self.slot()
        return self._buffer

    def submit(self, local_step: int, weight: float = 1.0) -> Receipt:
        """Submit the gradient in the buffer, unless it is stale."""
        assert self._buffer is not None
        return self.apply_grad(self._buffer, local_step, weight=weight)

    def useful(self, step: int) -> int:
        """Return the least step whose parameters are worth computing with at a step."""
        return step

    def next(self, step: int, deadline: Deadline) -> AbstractContextManager[Batch]:
        """Wait for the quorum that makes step ``step + 1``; the root only.

        Raises:
            EverybodyLeftError: If all ranks have left and no gradient is left.
        """
        return self.batch(self._quorum, deadline)

    def following(self, step: int) -> Batch | None:
        """Return None: more gradients may be admitted until `next`."""
        return None

    def awaited(self, step: int) -> str | None:
        """Return what the mean of a step lacks; None if it is complete."""
        return self.lacks(self._quorum, step)

    def tally(self) -> Tally:
        """Return the gradients accepted and dropped so far, of all ranks."""
        return self._shared.tally()

    def _free(self) -> None:
        self._buffer = None
        super()._free()

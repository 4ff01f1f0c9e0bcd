"""What a parameter server takes gradients from: a policy of admission.

`QuorumInbox` gives the mean of a quorum; `BoundedStalenessInbox` gives every gradient
by itself.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpcaccum.accumulator import ConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum.accumulator import Receipt, Tally
    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]


class Inbox(Protocol):
    """Gradients, flat vectors, on their way from the ranks to the server.

    Attributes:
        adds: Whether those of several ranks are added to one.
    """

    adds: bool

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients."""

    def slot(self) -> Array:
        """Return where this rank's next gradient is to be written."""

    def pin(self) -> None:
        """Let the device reach this rank's slots by itself."""

    def submit(self, local_step: int) -> Receipt:
        """Submit what lies in the slot, if it is fresh enough."""

    def missed(self, receipt: Receipt) -> int:
        """Return the least step whose gradient would have been admitted instead."""

    def next(
        self, step: int, deadline: Deadline
    ) -> contextlib.AbstractContextManager[Array]:
        """Wait for the gradient that makes step ``step + 1``; the host only.

        Raises:
            EverybodyLeftError: If all ranks have left and none is there.
        """

    def awaited(self, step: int) -> str | None:
        """Return what the update of a step lacks, if not only the host's work.

        For messages; any rank may ask.
        """

    def tally(self) -> Tally:
        """Return what was accepted and dropped so far, of all ranks."""

    def leave(self) -> None:
        """Promise that this rank submits no more."""

    def left(self) -> list[int]:
        """Return the ranks that have left."""

    def free(self) -> None:
        """Free the windows. Collective."""


class QuorumInbox:
    """Admits gradients of the current step; gives their mean once a quorum is there.

    Args:
        group, host: The ranks, and which of them serves.
        size, dtype: Of a gradient, a flat vector.
        quorum: Gradients of one update.
        workers: Ranks that submit, and may leave.
    """

    adds = True

    def __init__(
        self, group: Group, host: int, size: int, dtype: Any, quorum: int, workers: int
    ) -> None:
        self._quorum = quorum
        self._accumulator = ConditionalAccumulator(
            dtype, (size,), name="gradients", comm=group, host=host, workers=workers
        )
        self._slot: Array | None = None
        # Memory for the mean: the host's, the same for all updates.
        self._mean: Array | None = None

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients."""
        return self._accumulator.statistics().window_bytes

    def slot(self) -> Array:
        """Return where this rank's next gradient is to be written."""
        self._slot = self._accumulator.slot()
        return self._slot

    def pin(self) -> None:
        """Let the device reach this rank's slots by itself."""
        self._accumulator.pin_slots()

    def submit(self, local_step: int) -> Receipt:
        """Submit what lies in the slot, unless an update was made meanwhile."""
        return self._accumulator.apply_grad(self._slot, local_step)

    def missed(self, receipt: Receipt) -> int:
        """Return the least step whose gradient would have been admitted instead."""
        return receipt.global_step

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Array]:
        """Wait for the mean that makes step ``step + 1``; the host only."""
        self._mean = self._accumulator.take_grad(
            self._quorum, timeout=deadline.remaining, out=self._mean
        )
        yield self._mean

    def awaited(self, step: int) -> str | None:
        """Return what the mean of a step lacks; None if all of it has come."""
        return self._accumulator.awaited(self._quorum, step)

    def tally(self) -> Tally:
        """Return what was accepted and dropped so far, of all ranks."""
        return self._accumulator.statistics().tally

    def leave(self) -> None:
        """Promise that this rank submits no more."""
        self._accumulator.leave()

    def left(self) -> list[int]:
        """Return the ranks that have left."""
        return list(self._accumulator.statistics().left)

    def free(self) -> None:
        """Free the windows. Collective."""
        self._slot = None
        self._accumulator.free()

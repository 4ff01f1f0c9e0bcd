"""The contract of an inbox: where a parameter server takes its gradients from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hpcaccum.rows import RowPlace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hpcaccum.accumulator import Batch, Membership, Receipt, Tally
    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array
    from hpcaccum.nodes import NodeParts


class Inbox(Protocol):
    """Gradients, flat vectors, on their way from the ranks to the server.

    An inbox is a policy of admission. There are two: `QuorumInbox` passes on the
    gradients of a quorum together, `BoundedStalenessInbox` each gradient separately.

    Attributes:
        adds: Whether the gradients of several ranks are added. The parameters of an
            update are then sent to their nodes unasked.
        needs_all: Whether each rank that has not left gives one gradient of each
            update, so that none is made without it.
    """

    adds: bool
    needs_all: bool

    @property
    def parts(self) -> NodeParts:
        """The memory in which gradients lie until they are applied."""

    @property
    def membership(self) -> Membership:
        """Which ranks have left."""

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds gradients."""

    def start(self, step: int) -> None:
        """Set the step of the first update; the root only, before any submission."""

    def buffer(self, known: int = 0) -> Array:
        """Return the memory for this rank's next gradient.

        This rank has the parameters of the step ``known``; it may spare a round trip.
        """

    def pin(self) -> None:
        """Pin this rank's buffers for DMA."""

    def submit(self, local_step: int, weight: float = 1.0) -> Receipt:
        """Submit the gradient in the buffer, unless it is stale.

        The weight is 1 if the inbox does not add gradients.
        """

    def count_nonfinite(self) -> None:
        """Count a gradient of this rank that is not finite, and was not submitted."""

    def useful(self, step: int) -> int:
        """Return the least step whose parameters are worth computing with at a step."""

    def next(self, step: int, deadline: Deadline) -> AbstractContextManager[Batch]:
        """Wait for the gradients that make step ``step + 1``; the root only.

        The block of a ``with`` statement reads them; there are none if all of them were
        given up. At its end, their ranks may write new ones. If it raises, the next
        call gives the same gradients again, without those on a node that is lost.

        Raises:
            WaitTimeoutError: If it does not arrive in time.
            EverybodyLeftError: If all ranks have left and no gradient is left.
        """

    def following(self, step: int) -> Batch | None:
        """Return the gradients that `next` will use at a later step; the root only.

        None if they are not known yet.
        """

    def awaited(self, step: int) -> str | None:
        """Return what the update of a step lacks; None if only the root's work.

        For messages; any rank may call it.
        """

    def tally(self) -> Tally:
        """Return the gradients accepted and dropped so far, of all ranks."""

    def leave(self) -> None:
        """Promise that this rank submits no more gradients."""

    def check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left."""

    def free(self) -> None:
        """Free the memory. Collective."""


# Makes an inbox, given the size and the dtype of a gradient, and the places of rows in
# it.
MakeInbox = Callable[[int, np.dtype[Any], Sequence[RowPlace]], Inbox]

"""What agents send to each other of a vector that one rank publishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.server.double_buffer import DoubleBuffer

Array = np.ndarray[Any, Any]

# The place of a node that has nothing yet.
NOTHING = -1


class Messages:
    """Sends all of a vector, and nothing else."""

    def pack(self, flat: Array, since: int, spare: Array | None) -> tuple[Array, int]:
        """Return a message with what another node lacks, and its next place.

        Args:
            flat: The vector, which its publisher may be overwriting: what is returned
                is then of no use.
            since: The place that this method returned with the last message to that
                node; `NOTHING` before.
            spare: A message that is not used any more, if there is one.

        Returns:
            A vector of bytes, in memory of its own; and which changes that node has
            with it.
        """
        message = np.empty(flat.nbytes, np.uint8) if spare is None else spare
        np.copyto(message, flat.view(np.uint8))
        return message, NOTHING

    def room(self, nbytes: int, flat: Array) -> Array:
        """Return the memory in which a message is received.

        Args:
            nbytes: Of the message.
            flat: The vector to bring up to date.
        """
        return flat.view(np.uint8)

    def unpack(self, message: Array, copies: DoubleBuffer) -> None:
        """Bring the copy that is written up to date with a message."""

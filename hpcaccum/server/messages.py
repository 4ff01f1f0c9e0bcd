"""Messages in which agents send a published vector to other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.dtypes import Array
    from hpcaccum.server.double_buffer import DoubleBuffer

# The place of a node that has nothing yet.
NOTHING = -1


class Draft:
    """A message that is being made, of all of a vector; `RowDraft` makes one of rows.

    Args:
        spare: A message that is not used any more, if there is one.

    Attributes:
        place: Which changes a node has with the message.
    """

    place = NOTHING

    def __init__(self, spare: Array | None) -> None:
        self._message = spare

    def read(self, flat: Array) -> None:
        """Copy what another node lacks.

        Called again, with the newest vector, until no update has overwritten the vector
        meanwhile.
        """
        if self._message is None:
            self._message = np.empty(flat.nbytes, np.uint8)
        np.copyto(self._message, flat.view(np.uint8))

    def message(self) -> Array:
        """Return the message, a vector of bytes."""
        assert self._message is not None
        return self._message


class Messages:
    """What `Parameters` send: all of a vector; `SparseCopier` sends changed rows.

    Attributes:
        whole: Whether each message is all of a vector, whatever a node has.
    """

    whole = True

    def draft(self, since: int, spare: Array | None) -> Draft:
        """Return a new message to another node."""
        return Draft(spare)

    def room(self, nbytes: int, flat: Array) -> Array:
        """Return the memory in which a message is received."""
        return flat.view(np.uint8)

    def unpack(self, message: Array, copies: DoubleBuffer) -> None:
        """Bring the copy that is written up to date with a message."""

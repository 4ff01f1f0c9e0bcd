"""Which rows the last updates have changed, in memory of the node."""

from __future__ import annotations

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.mpi import AtomicWords, Group, memory_of_rank

# Entries before the first word may be overwritten, if they are `size` or more behind
# it. Those before the second one are complete.
_RESERVED, _WRITTEN = 0, 1


class RowLog:
    """Numbers of rows, one after the other; the last ones can be read. Collective.

    The position of an entry is the number of entries before it. The root, a rank of the
    node, appends entries, of which the last ``size`` can be read. It waits for no
    reader: one that is too slow finds that entries were overwritten. On the root, `end`
    is the position after the last entry.
    """

    def __init__(self, group: Group, root: int, size: int) -> None:
        self._size = max(1, size)
        nbytes = self._size * np.dtype(np.int64).itemsize
        self._ring: Array = memory_of_rank(group, root, nbytes).view(np.int64)
        self._words = AtomicWords(group, root, 2)
        self.end = 0

    def append(self, rows: Array) -> None:
        """Append entries; the root only."""
        end = self.end + rows.size
        # Readers must be able to see this before anything is overwritten.
        self._words.write(_RESERVED, end)
        last = rows[-self._size :]
        self._ring[np.arange(end - last.size, end) % self._size] = last
        self._words.write(_WRITTEN, end)
        self.end = end

    def between(self, begin: int, end: int) -> Array | None:
        """Return a copy of complete entries; None if some are overwritten."""
        end = min(end, self._words.read(_WRITTEN))
        if end - begin > self._size:
            return None
        found: Array = self._ring[np.arange(begin, end) % self._size]
        # All reads must be done before that of the word that validates them.
        self._words.sync()
        return found if self._words.read(_RESERVED) - self._size <= begin else None

    def sync(self) -> None:
        """Order this rank's loads and stores before it with those after it."""
        self._words.sync()

    def free(self) -> None:
        """Free the memory. Collective."""
        self._ring = np.empty(0, np.int64)
        self._words.free()

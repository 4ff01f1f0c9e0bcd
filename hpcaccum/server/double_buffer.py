"""Parameters that one rank publishes and all ranks read, never half an update.

There are two copies and two words. The publisher announces the version that it begins,
writes it over the older copy, then announces that it is complete. A reader copies the
newest complete version. Then it checks whether the publisher has begun the next version
but one, which overwrites what was read; if so, it reads again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import Pinned
from hpcaccum.mpi import AtomicWords, Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]

_VERSION, _BEGUN = 0, 1


class DoubleBuffer:
    """A flat vector on the root, with a version that counts up. Collective.

    Args:
        group: The ranks.
        root: The rank that publishes.
        size, dtype: Of the vector.
    """

    def __init__(self, group: Group, root: int, size: int, dtype: Any) -> None:
        self._size, self._dtype = size, np.dtype(dtype)
        self._stride = -(-size * self._dtype.itemsize // 64) * 64
        with contextlib.ExitStack() as undo:
            self._words = AtomicWords(group, root, 2)
            undo.callback(self._words.free)
            self._region = Region(group, root, 2 * self._stride, spread=False)
            undo.pop_all()
        self._scratch: Array | None = None
        self._pinned: Pinned | None = None

    def pin(self) -> None:
        """Pin the memory that `read` passes on; no-op if it is on another node."""
        if self._pinned is None and self._region.direct:
            whole = self._region.view(0, 0, 2 * self._stride, np.dtype(np.uint8))
            self._pinned = Pinned(whole)

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds the copies."""
        return self._region.nbytes_here

    def version(self) -> int:
        """Return the newest complete version."""
        return self._words.read(_VERSION)

    def start(self, fill: Callable[[Array], None], version: int = 0) -> None:
        """Write the first version; the root only, before any rank reads.

        Args:
            fill: Writes all of the vector that it is given.
            version: Its number.
        """
        fill(self._copy(version))
        self._region.sync()
        self._words.write(_BEGUN, version)
        self._words.write(_VERSION, version)

    def publish(self, fill: Callable[[Array], None]) -> int:
        """Write a new version; the root only.

        Args:
            fill: Writes all of the vector that it is given.

        Returns:
            The new version.
        """
        version = self._words.fetch_add(_BEGUN, 1) + 1
        # Readers must be able to see the announcement before anything is overwritten.
        self._words.sync()
        fill(self._copy(version))
        self._region.sync()
        self._words.write(_VERSION, version)
        return version

    def _copy(self, version: int) -> Array:
        offset = version % 2 * self._stride
        return self._region.view(0, offset, self._size, self._dtype)

    def read(self, use: Callable[[Array], None], deadline: Deadline) -> int:
        """Let ``use`` copy from the newest version; return the version.

        Args:
            use: Is given the vector and must only copy it: the contents are valid only
                if this was the last call.
            deadline: Passes if updates are published faster than they can be copied.

        Raises:
            WaitTimeoutError: If no copy was valid in time.
        """
        return deadline.wait(
            lambda: self._try(use),
            lambda: "a copy that no two updates of the parameters overtake",
        )

    def _try(self, use: Callable[[Array], None]) -> int | None:
        version = self.version()
        use(self._fetch(version))
        # All reads must be done before that of the word that validates them.
        self._words.sync()
        return version if self._words.read(_BEGUN) <= version + 1 else None

    def _fetch(self, version: int) -> Array:
        if self._region.direct:
            return self._copy(version)
        if self._scratch is None:
            self._scratch = np.empty(self._size, self._dtype)
        self._region.get(0, version % 2 * self._stride, self._scratch)
        return self._scratch

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._region.free()
        self._words.free()

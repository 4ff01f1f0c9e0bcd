"""Parameters that one rank publishes and its node reads, never half an update.

Rule 10 of docs/architecture.md, "The protocol", says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.layout import ALIGNMENT
from hpcaccum.mpi import AtomicWords, Group, memory_of_rank

T = TypeVar("T")

# A version is a step, and in these bits how often values have been assigned to it.
_ASSIGNED_BITS = 20
# The version of the newest complete copy, plus 1, and its number; the version of each.
_NEWEST, _HOLDS = 0, 1


def version_of(step: int) -> int:
    """Return the first version of a step."""
    return step << _ASSIGNED_BITS


def step_of(version: int) -> int:
    """Return the step of a version."""
    return version >> _ASSIGNED_BITS


def writer_inside(group: Group, root: int) -> tuple[Group, int]:
    """Return the ranks of this node, and the one that writes its copies. Collective."""
    if group.single_node:
        return group, root
    ranks = group.node_ranks
    return group.inside, ranks.index(root) if root in ranks else 0


class DoubleBuffer:
    """A vector on the root of a node, with a version that increases. Collective.

    Its ``memory`` has both copies.
    """

    def __init__(self, group: Group, root: int, size: int, dtype: Any) -> None:
        self.size, self.dtype = size, np.dtype(dtype)
        used = size * self.dtype.itemsize
        stride = -(-used // ALIGNMENT) * ALIGNMENT
        self.memory = memory_of_rank(group, root, 2 * stride)
        self._words = AtomicWords(group, root, 3)
        pieces = [self.memory[at : at + used] for at in (0, stride)]
        self._copies: list[Array] = [piece.view(self.dtype) for piece in pieces]

    def version(self) -> int:
        """Return the version of the newest complete copy; -1 if there is none."""
        return (self._words.read(_NEWEST) >> 1) - 1

    def has(self, version: int) -> Callable[[], bool]:
        """Return what finds out whether a version, or a newer one, is complete."""
        newest, least = self._words.watch(_NEWEST), (version + 1) << 1
        return lambda: newest() >= least

    @property
    def writing(self) -> int:
        """The number of the copy that `begin` returns."""
        return 1 - (self._words.read(_NEWEST) & 1)

    def begin(self, version: int) -> Array:
        """Return the memory for a new version, the largest so far; the root only."""
        copy = self.writing
        # Readers must be able to see this before anything is overwritten.
        self._words.write(_HOLDS + copy, version)
        self._words.sync()
        return self.copy(copy)

    def complete(self, version: int) -> None:
        """Publish what `begin` returned the memory for."""
        self._words.write(_NEWEST, (version + 1) << 1 | self.writing)

    def copy(self, copy: int) -> Array:
        """Return the memory of a copy, 0 or 1."""
        return self._copies[copy]

    def read(self, use: Callable[[Array], T], deadline: Deadline) -> tuple[int, T]:
        """Let ``use`` copy what is newest; return its version, and what it returns."""

        def read() -> tuple[int, T] | None:
            version, copy = self.newest()
            found = use(self.copy(copy))
            return (version, found) if self.has_kept(version, copy) else None

        missing = "a copy that no two updates of the parameters overtake"
        return deadline.wait(read, lambda: missing)

    def newest(self) -> tuple[int, int]:
        """Return the version and the number of the newest complete copy."""
        newest = self._words.read(_NEWEST)
        return (newest >> 1) - 1, newest & 1

    def has_kept(self, version: int, copy: int) -> bool:
        """Return whether what was read from a copy until now was that of a version."""
        # All reads must be done before that of the word that validates them.
        self._words.sync()
        return self._words.read(_HOLDS + copy) == version

    def free(self) -> None:
        """Free the memory. Collective."""
        self.memory, self._copies = np.empty(0, np.uint8), []
        self._words.free()

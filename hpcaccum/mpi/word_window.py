"""Windows of words, of which several objects have a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.mpi.runtime import MPI
from hpcaccum.mpi.windows import allocate, make_progress

if TYPE_CHECKING:
    from hpcaccum.mpi.group import Group

# Words of a window, at least; and between the beginnings of two parts, two lines of the
# cache, which some processors fetch together.
_LEAST, _APART = 4096, 16


class WordWindow:
    """A window with words, of which several `AtomicWords` have a part. Collective.

    MPI needs milliseconds and a communicator for a window, of which MPICH has 2,048. No
    word is used twice. So all words of a part are 0 at first, and no rank has to wait
    for the others when it takes or returns a part.

    Args:
        group: The ranks.
        root: The rank with the memory.
        count: Number of words.

    Attributes:
        mpi: The window itself.
        words: The words, where this rank may load and store them; else None.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self._count, self._taken, self._users = count, 0, 0
        self.mpi = allocate(group, root, count * 8, 8)
        self.words = self._map(group, root)
        self._end_progress = make_progress(
            group, root, self.mpi, lambda memory: memory[: 8 * self._taken]
        )

    @classmethod
    def of(cls, group: Group, root: int, count: int) -> WordWindow:
        """Return a window on a rank with room for ``count`` words. Collective.

        Ranks take and return parts in the same order, so all return the same window.
        """
        name = f"words on rank {root}"
        found = group.named.get(name)
        if not (isinstance(found, cls) and found._has_room(count)):
            found = group.named[name] = cls(group, root, max(count, _LEAST))
        return found

    def _map(self, group: Group, root: int) -> memoryview | None:
        memory: Any = None
        if group.single_node:
            memory = self.mpi.Shared_query(root)[0]
        elif group.rank == root and self.mpi.model == MPI.WIN_UNIFIED:
            memory = self.mpi.tomemory()
        return None if memory is None else memoryview(memory).cast("B").cast("q")

    def _has_room(self, count: int) -> bool:
        # A window that was freed has none.
        return self._taken + count <= self._count

    def take(self, count: int) -> int:
        """Return the index of the first of ``count`` words that nobody has."""
        first = self._taken
        self._taken += -(-count // _APART) * _APART
        self._users += 1
        return first

    def give_back(self) -> None:
        """Return a part; free the window if it was the last one. Collective."""
        self._users -= 1
        if self._users:
            return
        self._taken = self._count
        self._end_progress()
        self.words = None
        self.mpi.Unlock_all()
        self.mpi.Free()

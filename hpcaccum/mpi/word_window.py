"""Windows of words, of which the objects of a group have parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.mpi.windows import allocate, free

if TYPE_CHECKING:
    from hpcaccum.mpi.group import Group

# The fewest words of a window; and the distance between two parts: two lines of the
# cache, which some processors fetch together.
_LEAST, _APART = 4096, 16


class WordWindow:
    """A window with words, of which several `AtomicWords` have a part. Collective.

    MPI needs milliseconds and a communicator for a window, of which MPICH has 2,048. So
    a group keeps one for each rank that has words, until its communicators are freed.

    No word is used twice. So all words of a part are 0 at first, and no rank has to
    wait for the others when it takes or returns a part.

    Args:
        group: The ranks, all on one node.
        root: The rank with the memory.
        count: Number of words.

    Attributes:
        taken: How many words have been taken.
        mpi: The window itself.
        words: The words.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        self._count, self.taken, self._users = count, 0, 0
        # Whether no more parts are taken, so that the last one to be returned frees it.
        self._full = False
        self.mpi = allocate(group, root, count * 8, 8)
        memory: Any = self.mpi.Shared_query(root)[0]
        self.words = memoryview(memory).cast("B").cast("q")

    @classmethod
    def of(cls, group: Group, root: int, count: int) -> WordWindow:
        """Return a window on a rank with room for ``count`` words. Collective.

        Ranks take and return parts in the same order, so all return the same window.
        """
        found = group.windows.find(root)
        if found is not None and found._has_room(count):
            return found
        made = cls(group, root, max(count, _LEAST))
        group.windows.keep(root, made, group.order)
        if found is not None:
            found._close()
        return made

    def _has_room(self, count: int) -> bool:
        return self.taken + count <= self._count

    def take(self, count: int) -> int:
        """Return the index of the first of ``count`` words that nobody has."""
        first = self.taken
        self.taken += -(-count // _APART) * _APART
        self._users += 1
        return first

    def give_back(self) -> None:
        """Return a part. Collective if the window is full and this is the last one."""
        self._users -= 1
        if self._full and not self._users:
            self.free()

    def _close(self) -> None:
        """Free it when all parts are returned. Collective."""
        self._full = True
        if not self._users:
            self.free()

    def free(self) -> None:
        """Free it when all parts are returned. Collective."""
        self.words.release()
        free(self.mpi)

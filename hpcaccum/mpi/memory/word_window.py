"""Windows of words, of which the objects of a group have parts.

A group keeps them until its communicators are freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hpcaccum.mpi.job.shutdown import at_end, forget
from hpcaccum.mpi.memory.windows import allocate, free

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.mpi.talk.group import Group

# The fewest words of a window; and the distance between two parts: two lines of the
# cache, which some processors fetch together.
_LEAST, _APART = 4096, 16


class WordWindow:
    """A window with words, of which several `AtomicWords` have a part. Collective.

    MPI needs milliseconds and a communicator for a window, of which MPICH has 2,048. So
    a group keeps one for each rank that has words, until its communicators are freed.

    No word is used twice. So all words of a part are 0 at first, and no rank has to
    wait for the others when it takes or returns a part.

    The memory is that of the rank ``root``; all ranks are on one node.
    """

    def __init__(self, group: Group, root: int, count: int) -> None:
        # How many words there are, have been taken, and parts of them that are in use.
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
        kept = KeptWindows.of(group).open
        found = kept.get(root)
        if found is not None and found.taken + count <= found._count:
            return found
        kept[root] = cls(group, root, max(count, _LEAST))
        if found is not None:
            found._close()
        return kept[root]

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


class KeptWindows:
    """Each `WordWindow` of a group: one for each rank that has words of objects.

    All ranks of the group take words in the same order, and compare at times how many
    they have taken (`Group.agree`).
    """

    def __init__(self) -> None:
        # By the rank with the memory.
        self.open: dict[int, WordWindow] = {}
        # Those of which no more words are taken, as ranks disagree about them.
        self._abandoned: list[WordWindow] = []

    @classmethod
    def of(cls, group: Group) -> KeptWindows:
        """Return those of a group."""
        if group.kept is None:
            kept = group.kept = cls()
            at_end(kept.free, group.order)
        return cast(KeptWindows, group.kept)

    def state(self) -> dict[int, int]:
        """Return how many words are taken, by rank with the memory."""
        return {root: window.taken for root, window in self.open.items()}

    def compare(self, states: Sequence[dict[int, int]]) -> None:
        """Take no more words of these windows if ranks have taken different ones.

        A constructor that has timed out on some ranks leaves such ranks.
        """
        if any(each != states[0] for each in states):
            self._abandoned += self.open.values()
            self.open.clear()

    def free(self) -> None:
        """Free the windows, of which no object has words any more. Collective."""
        for window in [*self._abandoned, *self.open.values()]:
            window.free()
        self._abandoned.clear()
        self.open.clear()
        forget(self.free)

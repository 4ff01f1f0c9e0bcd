"""Which ranks contribute gradients, which have left or are lost, and the quorums."""

from __future__ import annotations

from collections.abc import Iterable

from hpcaccum.errors import BrokenObjectError, InvalidArgumentError, LostRankError
from hpcaccum.mpi import AtomicWords

# The word of a rank. It changes once, from 0; that of a rank that comes back, again. A
# rank itself says that it is broken, others say that it is dead.
_PRESENT, _LEFT, _COMES_BACK, _BROKEN, _DEAD = range(5)


class Membership:
    """The ranks that contribute gradients, those that have left, and those lost.

    Each rank has a word. A rank that leaves sets its own. A rank is lost if it can do
    no more: its call on the object has broken, or its process has died. What it was
    admitted with and has not written is left out.

    Another word, the one at ``base``, counts the changes, so that a rank that waits
    reads one word, together with those before it.

    Attributes:
        workers: How many ranks contribute. If not all, the root does not.
        has_left: Whether this rank has left, or begun to, or is lost.
        comes_back: Whether it left to come back.
    """

    def __init__(
        self, words: AtomicWords, base: int, rank: int, size: int, workers: int
    ) -> None:
        self._words, self._base, self._rank, self._size = words, base, rank, size
        self.workers, self.has_left, self.comes_back = workers, False, False
        # Those that never contribute.
        self._others = {words.root} if workers < size else set()
        # How many had left at a count of changes.
        self._counted = 0, 0
        self._broken: BaseException | None = None

    @staticmethod
    def words(size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return 1 + size

    def changes(self) -> int:
        """Return how often ranks have left, come back, or been lost."""
        return self._words.read(self._base)

    def num_left(self, changes: int) -> int:
        """Return how many ranks had left, or were lost, after so many changes."""
        if self._counted[0] != changes:
            self._counted = changes, sum(map(bool, self._states()))
        return self._counted[1]

    def _states(self) -> list[int]:
        return self._words.read_range(self._base + 1, self._size)

    def left(self) -> list[int]:
        """Return the ranks that have left, or are lost."""
        return [rank for rank, state in enumerate(self._states()) if state]

    def lost(self) -> list[int]:
        """Return the ranks that are lost."""
        return [rank for rank, state in enumerate(self._states()) if state >= _BROKEN]

    def dead(self) -> list[int]:
        """Return the ranks that others have given up."""
        return [rank for rank, state in enumerate(self._states()) if state == _DEAD]

    def present(self) -> set[int]:
        """Return the ranks that may still contribute."""
        return set(range(self._size)) - set(self.left()) - self._others

    def exclude(self, ranks: Iterable[int]) -> None:
        """Name ranks in no message: they are not among the workers."""
        self._others.update(ranks)

    def quorum(self, required: int, changes: int) -> int:
        """Return how many gradients suffice after so many changes."""
        present = self.workers - self.num_left(changes)
        if required <= self.workers:
            return max(1, min(required, present))
        return max(1, -(-required * present // self.workers))

    def all_left(self, changes: int) -> bool:
        """Whether no rank will contribute, after so many changes."""
        return changes > 0 and self.num_left(changes) >= self.workers

    def check_present(self) -> None:
        """Raise an error if this rank has left, or its object is broken."""
        if not self.has_left:
            self.check_counts(self._rank)
            return
        if isinstance(self._broken, LostRankError):
            raise LostRankError(str(self._broken))
        if self._broken is not None:
            raise BrokenObjectError(
                f"rank {self._rank} can apply no more gradients: an exception ended "
                f"a call, and the rank has left ({self._broken!r})"
            ) from self._broken
        raise InvalidArgumentError(
            f"rank {self._rank} has left and can apply no more gradients"
        )

    def check_counts(self, rank: int) -> None:
        """Raise LostRankError if the others have given a rank up.

        It was cut off, or stopped. On another node, the agent of the root's tells it.
        """
        words = self._words
        if words.direct and words.memory[self._base + 1 + rank] == _DEAD:
            raise LostRankError(
                f"rank {rank} was cut off, or stopped: the other ranks have given it "
                f"up and go on without it"
            )

    def leave(self) -> None:
        """Promise that this rank contributes no more; only the first call counts."""
        if not self.has_left:
            self.has_left = True
            self._set(_COMES_BACK if self.comes_back else _LEFT)

    def lose(self, error: BaseException) -> None:
        """Give this rank up, because of an exception in the middle of a call."""
        left = self.has_left
        self.end(error)
        if not left:
            self._set(_BROKEN)

    def end(self, error: BaseException) -> None:
        """Note why this rank can do no more; others know it, or learn it elsewhere."""
        self._broken, self.has_left = self._broken or error, True

    def lose_rank(self, rank: int) -> None:
        """Give another rank up, whose process has died; by one rank."""
        for state in (_PRESENT, _COMES_BACK):
            self._words.compare_and_swap(self._base + 1 + rank, state, _DEAD)
        # Also if it had left: it may have died before it counted that.
        self._words.fetch_add(self._base, 1)

    def _set(self, state: int) -> None:
        self._words.write(self._base + 1 + self._rank, state)
        self._words.fetch_add(self._base, 1)

    def some_come_back(self) -> bool:
        """Whether a rank has left to come back."""
        return _COMES_BACK in self._states()

    def come_back(self) -> None:
        """End an absence, if this rank has left to come back.

        All ranks that take gradients know that it has left.
        """
        if self.comes_back:
            self._set(_PRESENT)
            self.has_left = self.comes_back = False

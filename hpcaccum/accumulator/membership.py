"""Which ranks contribute gradients, which have left, and which quorums remain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcaccum.mpi import AtomicWords


# The word of a rank that has left.
_LEFT, _COMES_BACK = 1, 2


class Membership:
    """The ranks that contribute gradients, and those of them that have left.

    A rank that leaves sets a word of its own, which names it, and increments the number
    of ranks that have left, which a waiting rank reads. The word also says whether the
    rank comes back.

    Args:
        words: The words of the object.
        base: Index of the first of ``Membership.words(size)`` words. This one is the
            number of ranks that have left, to be read together with the words before.
        rank: This rank.
        size: The number of ranks.
        workers: How many of them contribute. If not all, the root does not.

    Attributes:
        workers: As given.
        has_left: Whether this rank has left, or begun to.
        comes_back: Whether it left to come back.
    """

    def __init__(
        self, words: AtomicWords, base: int, rank: int, size: int, workers: int
    ) -> None:
        self._words, self._base, self._rank, self._size = words, base, rank, size
        self.workers, self.has_left, self.comes_back = workers, False, False
        # Those that never contribute.
        self._others = {words.root} if workers < size else set()
        # The increment that `leave` must not make twice.
        self._increment = Attempt()

    @staticmethod
    def words(size: int) -> int:
        """Return the number of words for ``size`` ranks."""
        return 1 + size

    def num_left(self) -> int:
        """Return how many ranks have left."""
        return self._words.read(self._base)

    def left(self) -> list[int]:
        """Return the ranks that have left."""
        words = self._words.read_range(self._base + 1, self._size)
        return [rank for rank, word in enumerate(words) if word]

    def present(self) -> set[int]:
        """Return the ranks that may still contribute."""
        return set(range(self._size)) - set(self.left()) - self._others

    def exclude(self, ranks: Iterable[int]) -> None:
        """Name ranks in no message: they are not among the workers."""
        self._others.update(ranks)

    def quorum(self, required: int, num_left: int) -> int:
        """Return how many gradients suffice after ``num_left`` ranks have left."""
        present = self.workers - num_left
        if required <= self.workers:
            return max(1, min(required, present))
        return max(1, -(-required * present // self.workers))

    def all_left(self, num_left: int) -> bool:
        """Whether no rank will contribute after ``num_left`` ranks have left."""
        return num_left >= self.workers

    def check_present(self, verb: str) -> None:
        """Raise InvalidArgumentError if this rank has left."""
        if self.has_left:
            raise InvalidArgumentError(
                f"rank {self._rank} has left and can {verb} no more gradients"
            )

    def leave(self) -> None:
        """Promise that this rank contributes no more; only the first call counts.

        An exception does not stop it: the rank has left when this returns or raises.
        """
        try:
            self._leave()
        except BaseException:
            # After half of it, takes would still wait for this rank.
            self._leave()
            raise

    def _leave(self) -> None:
        self.has_left = True
        word = _COMES_BACK if self.comes_back else _LEFT
        self._words.write(self._base + 1 + self._rank, word)
        self._words.settle()
        if not self._increment.added:
            self._words.fetch_add(self._base, 1, self._increment)

    def some_come_back(self) -> bool:
        """Whether a rank has left to come back."""
        return _COMES_BACK in self._words.read_range(self._base + 1, self._size)

    def come_back(self) -> None:
        """End an absence, if this rank has left to come back.

        All ranks that take gradients know that it has left.
        """
        if self.comes_back:
            self._words.write(self._base + 1 + self._rank, 0)
            self._words.settle()
            self._words.fetch_add(self._base, -1, Attempt())
            self._increment = Attempt()
            self.has_left = self.comes_back = False

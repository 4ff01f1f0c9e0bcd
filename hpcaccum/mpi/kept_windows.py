"""The windows that a group keeps until its communicators are freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.mpi.shutdown import at_end, forget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.mpi.shutdown import Order
    from hpcaccum.mpi.word_window import WordWindow


class KeptWindows:
    """Each `WordWindow` of a `Group`: one for each rank that has words of objects.

    All ranks of the group take words in the same order, and compare at times how many
    they have taken.
    """

    def __init__(self) -> None:
        self._open: dict[int, WordWindow] = {}
        # Those of which no more words are taken, as ranks disagree about them.
        self._abandoned: list[WordWindow] = []

    def find(self, root: int) -> WordWindow | None:
        """Return the window whose memory a rank has, if there is one."""
        return self._open.get(root)

    def keep(self, root: int, window: WordWindow, order: Order) -> None:
        """Keep a window instead of an earlier one of that rank. Collective."""
        if not self._open and not self._abandoned:
            at_end(self.free, order)
        self._open[root] = window

    def taken(self) -> dict[int, int]:
        """Return how many words are taken, by rank with the memory."""
        return {root: window.taken for root, window in self._open.items()}

    def compare(self, taken: Sequence[Mapping[int, int]]) -> None:
        """Take no more words of these windows if ranks have taken different ones.

        A constructor that has timed out on some ranks leaves such ranks.

        Args:
            taken: What `taken` returned on each rank.
        """
        if any(each != taken[0] for each in taken):
            self._abandoned += self._open.values()
            self._open.clear()

    def free(self) -> None:
        """Free the windows, of which no object has words any more. Collective."""
        for window in [*self._abandoned, *self._open.values()]:
            window.free()
        self._abandoned.clear()
        self._open.clear()
        forget(self.free)

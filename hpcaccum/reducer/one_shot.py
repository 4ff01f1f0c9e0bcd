"""Sums of small arrays over the ranks of a node, which meet once.

Every rank copies its arrays to where others see them, and then sums all of them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import AtomicWords, NodeMemory
from hpcaccum.reducer.call import BITS, Quiet, agree, copy
from hpcaccum.reducer.spin_wait import SpinWait
from hpcaccum.summation import add_at_once

if TYPE_CHECKING:
    from hpcaccum.layout import Layout
    from hpcaccum.mpi import Group
    from hpcaccum.reducer.call import Call, Wait

Array = np.ndarray[Any, Any]


class OneShot:
    """Sums of small arrays over the ranks of a node.

    There are two copies of each rank's arrays, used in turns: a rank that is one call
    ahead does not overwrite what a slower one still sums.

    Args:
        group: The ranks.
        layout: Of the arrays.

    Attributes:
        arrays: This rank's arrays.
        results: Of the last call.
        sent, received: The flat memory of the two.
        divisor: Of the sums.
    """

    def __init__(self, group: Group, layout: Layout) -> None:
        self._group, self.divisor = group, 1
        wide = accumulation_dtype(layout.dtype)
        self.sent = np.zeros(layout.size, layout.dtype)
        self.received = np.zeros(layout.size, wide)
        self.arrays, self.results = layout.views(self.sent), layout.views(self.received)
        self._memory = NodeMemory(group, [2 * layout.nbytes] * group.size)
        both = [part.view(layout.dtype) for part in self._memory.parts]
        self._copies = [
            [p[: layout.size] for p in both],
            [p[layout.size :] for p in both],
        ]
        self._mine = [layout.views(copies[group.rank]) for copies in self._copies]
        self._words = AtomicWords(group, 0, group.size)
        self._spin, self._quiet, self._calls = SpinWait(group), Quiet(), 0
        self.window_bytes, self.result_bytes = 2 * layout.nbytes, self.received.nbytes

    def offer(self, count: int) -> None:
        """Do nothing: it is not worth while."""

    def finish(self, call: Call) -> bool:
        """Sum; return whether all ranks have the same signature."""
        self._calls += 1
        parity = self._calls % 2
        if call.ready is not None:
            call.ready(0)
        if not call.whole:
            self._copies[parity][self._group.rank][:] = self.sent
        if call.brought:
            copy(call.brought, self._mine[parity])
        if not self._meet(self._calls << BITS | call.signature, call.wait):
            return False
        self._quiet(add_at_once, self._copies[parity], self.received, self.divisor)
        call.tell(1)
        if call.out:
            copy(self.results, call.out)
        return True

    def _meet(self, mine: int, wait: Wait) -> bool:
        """Wait for the words of all; return whether their signatures are mine."""
        read, size = self._words.read_range, self._group.size
        self._words.store(self._group.rank, [mine])
        if read(0, size) == (expected := [mine] * size):
            return True
        least = self._calls << BITS
        self._spin(lambda: min(read(0, size)) >= least, wait)
        return (words := read(0, size)) == expected or agree(words, mine)

    def late(self) -> list[int] | None:
        """Return the ranks that this one waits for."""
        words = self._words.read_range(0, self._group.size)
        return [r for r, word in enumerate(words) if word >> BITS < self._calls]

    def free(self, *, abandoned: bool = False) -> None:
        """Free the words, and let go of the memory. Collective."""
        self._copies, self._mine = [], []
        self._memory.free()
        self._words.free()

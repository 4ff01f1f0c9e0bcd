"""Reducer: the sum of named arrays over a group, by the MPI library's allreduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.errors import DisagreementError, FreedError, WaitTimeoutError
from hpcaccum.group import ranks_text
from hpcaccum.layout import Layout
from hpcaccum.mpi import MPI
from hpcaccum.window import Cells, Opened, Progress

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpcaccum.group import Group

Array = np.ndarray[Any, Any]

# Travels with the arrays: whether a rank has failed, the step and its square, then one
# flag an array. Numbers whose sum and sum of squares are n times mine are all mine.
_CHECK = "?check"
_FAILED, _STEP, _SQUARE, _PRESENT = range(4)
# Sums of squares are exact in float32 for up to 2**12 ranks.
_STEPS = 1 << 6


class Reducer:
    """Sums arrays of one layout over a group, again and again. Collective.

    What a plain allreduce leaves to luck is checked in every call, with numbers that
    travel with the data: that all ranks are at the same step (MPI would pair a call
    with the next one of a rank that skipped it, and sum different steps), and that all
    ranks bring the same arrays. Calls of two reducers are never paired.

    The order of summation is the MPI library's: the same ranks, library and settings
    give the same bits, in practice, but MPI only recommends it (MPI-4.1, 6.9.1).

    Args:
        layout: The arrays. Half precision travels and is summed in float32.
        group: The ranks.
        what: Name for messages.
    """

    def __init__(self, layout: Layout, group: Group, what: str = "reducer") -> None:
        group.agree(what, lambda: {"names, shapes and dtype": layout.fingerprint})
        self._group, self._what, self._names = group, what, list(layout)
        # MPI pairs collective calls on one communicator by their order alone.
        self._comm = group.comm.Dup()
        shapes = {**layout.shapes, _CHECK: (_PRESENT + len(layout),)}
        wide = Layout(shapes, layout.dtype)
        self._buffer = np.zeros(wide.size, wide.dtype)
        self._arrays = wide.views(self._buffer)
        self._check = self._arrays.pop(_CHECK)
        self._calls, self.waited, self._given_up = 0, 0.0, False
        # The number of the call that each rank came to, for messages.
        self._arrived = Cells(group, 0, group.size)
        if group.rank == 0:
            # Ranks of other nodes ask here who is late, also when that is this one.
            Progress.of(group).start()
        self._opened = Opened(group, self._free)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that are summed: write, `reduce`, read the sums."""
        return dict(self._arrays)

    def reduce(self, present: Collection[str] | None = None, *, step: int = 0) -> None:
        """Replace each array by its sum over the ranks. Collective.

        Args:
            present: Names of the arrays that matter; all by default. Others are not
                touched by the caller and have no meaning afterwards.
            step: What this rank is at, at least 0, by a count that it also raises when
                it skips a call. Ranks that are a multiple of 64 apart go unnoticed.

        Raises:
            DisagreementError: On every rank, if ranks bring different arrays or are at
                different steps; the sums are then without meaning.
            Exception: On every rank, if one came with `fail`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; names who did not come.
                The reducer is then of no further use: MPI still works in its memory.
        """
        flags = [present is None or name in present for name in self._names]
        self._exchange(flags, step, None)

    def fail(self, error: Exception) -> NoReturn:
        """Take part in a call only to raise ``error`` on every rank. Collective.

        For a rank that finds out alone that it has nothing to bring, while the others
        wait for it.
        """
        self._exchange([False] * len(self._names), 0, error)
        raise error

    def _exchange(self, flags: list[bool], step: int, error: Exception | None) -> None:
        if self._opened.closed:
            raise FreedError(f"{self._what} was freed")
        if self._given_up:
            raise WaitTimeoutError(
                f"{self._what}: allreduce {self._calls} was given up, and ranks cannot "
                f"be in step again; start anew"
            )
        self._calls += 1
        low = step % _STEPS
        self._check[:_PRESENT] = error is not None, low, low * low
        self._check[_PRESENT:] = flags
        mine = self._check.copy()
        self._arrived.post(self._group.rank, [self._calls])
        deadline = Deadline(None, f"{self._what}: allreduce {self._calls}")
        request = self._comm.Iallreduce(MPI.IN_PLACE, self._buffer)
        self._given_up = True
        deadline.wait(lambda: request.Test() or None, self._missing)
        self._given_up = False
        self.waited += deadline.elapsed
        if self._check[_FAILED]:
            self._group.raise_together(self._what, error)
        self._compare(mine, step)

    def _missing(self) -> str:
        words = self._arrived.read_range(0, self._group.size)
        late = [rank for rank, call in enumerate(words) if call < self._calls]
        return f"{ranks_text(late)} of {self._group.size} to make the same call"

    def _compare(self, mine: Array, step: int) -> None:
        if np.array_equal(self._check, mine * self._group.size):
            return
        told = [str(step), *("one" if flag else "none" for flag in mine[_PRESENT:])]
        everybody = self._group.meet(told, self._what)
        facts = ["step", *(f"gradient of {name}" for name in self._names)]
        for fact, values in zip(facts, zip(*everybody, strict=True), strict=True):
            if others := [r for r, value in enumerate(values) if value != values[0]]:
                raise DisagreementError(
                    f"{self._what}: {fact} must be the same on all {len(values)} "
                    f"ranks: rank 0 has {values[0]}, rank {others[0]} has "
                    f"{values[others[0]]} ({ranks_text(others)} unlike rank 0)"
                )

    def free(self) -> None:
        """Free what messages need. Collective."""
        self._opened.close()

    def _free(self) -> None:
        self._group.meet(None, f"{self._what}: free")
        if self._group.rank == 0:
            Progress.of(self._group).stop()
        self._arrived.free()
        self._comm.Free()

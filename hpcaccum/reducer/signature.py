"""Signatures: whether all ranks make the same call, in one number of 64 bits.

Each rank forms a number from what must be the same on all ranks. The ranks compare
these numbers while the data travel; only if they differ do they exchange the facts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.errors import format_ranks
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group

# The signature of a rank that takes part only to raise.
FAILED = 0


def digest(*facts: object) -> int:
    """Return a hash of 64 bits, the same on all ranks, of facts that have a `repr`."""
    found = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def canonical(number: float) -> float:
    """Return a number of Python, the same for equal numbers of any types."""
    wide = float(number)
    return int(number) if wide.is_integer() else wide


class Agreement:
    """Compares a number on all ranks while data travel. Collective.

    Attributes:
        request: When it is complete, `reached` is valid.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, number: int) -> None:
        # All numbers are equal if the largest is the smallest. -number may not fit.
        self._words = np.array([number, ~number], np.int64)
        self.request = comm.Iallreduce(MPI.IN_PLACE, self._words, MPI.MAX)

    @property
    def reached(self) -> bool:
        """Whether the number is the same on all ranks."""
        return bool(self._words[0] == ~self._words[1])


class Interruption(Exception):
    """A call was not made, because ranks called `Reducer.interrupt` in its place.

    Attributes:
        notes: What each rank passed; None for one that made the call.
    """

    def __init__(self, what: str, notes: Sequence[Any]) -> None:
        ranks = [rank for rank, note in enumerate(notes) if note is not None]
        super().__init__(f"{what}: interrupted by {format_ranks(ranks)}")
        self.notes = list(notes)


def explain(
    group: Group,
    what: str,
    facts: Mapping[str, str],
    error: Exception | None,
    note: Any = None,
) -> NoReturn:
    """Raise on every rank what is wrong on one, or which fact differs. Collective."""
    reports = group.raise_together(what, error, (facts, note))
    notes = [note for _, note in reports]
    if any(note is not None for note in notes):
        raise Interruption(what, notes)
    group.compare(what, [facts for facts, _ in reports])
    raise RuntimeError(f"{what}: ranks make different calls, but their arguments agree")

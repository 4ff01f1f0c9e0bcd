"""Signatures: whether all ranks make the same call, in one number.

Each rank forms a number from what must be the same on all ranks. The ranks compare
these numbers while the data travel; only if they differ do they exchange the facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcaccum.errors import format_ranks
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.mpi import Group

# Bits of a signature in a word whose other bits count calls or buckets.
BITS = 24
# The signature of a rank that takes part only to raise.
FAILED = 0

# Two different calls have the same signature once in 10**7 times.
_PRIME = (1 << BITS) - 3


def digest(numbers: Iterable[float]) -> int:
    """Return a number that depends on all of these, the same on all ranks."""
    # Python's hash of numbers, unlike that of text, is the same in all processes.
    return hash(tuple(numbers))


def signature(begun: int, step: int, names: int, divisor: int, more: int) -> int:
    """Return the signature of a call, at least 1.

    Args:
        begun: Number of calls that this rank has begun.
        step: Of the call.
        names: The set of arrays that this rank contributes, as bits.
        divisor: Of the sums.
        more: The `digest` of other numbers.
    """
    facts = (step * 1_000_003 + names) * 2_097_143 + divisor + begun * 9_576_899
    return (facts + more) % _PRIME + 1


def agree(words: Sequence[int], mine: int) -> bool:
    """Whether all signatures equal mine, in words whose counts are not below mine.

    A rank with a higher count has compared the signatures already.
    """
    return all(word == mine or word >> BITS > mine >> BITS for word in words)


class Agreement:
    """Compares a number on all ranks while data travel. Collective.

    Attributes:
        request: When it is complete, `reached` is valid.
    """

    def __init__(self, comm: mpi4py_MPI.Intracomm, number: int) -> None:
        # All numbers are equal if the largest is the smallest.
        self._words = np.array([number, -number], np.int64)
        self.request = comm.Iallreduce(MPI.IN_PLACE, self._words, MPI.MAX)

    @property
    def reached(self) -> bool:
        """Whether the number is the same on all ranks."""
        return bool(self._words[0] == -self._words[1])


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
    """Raise on every rank what is wrong on one, or which fact differs. Collective.

    Args:
        group: The ranks.
        what: Begins the messages.
        facts: What must be the same on all ranks, by name.
        error: What this rank raises; None if its own arguments are valid.
        note: Of a rank that interrupts the call; None if it makes the call.

    Raises:
        Exception: What one rank passed as ``error``.
        Interruption: Otherwise, if one passed a note.
        DisagreementError: Otherwise, if a fact differs.
    """
    reports = group.raise_together(what, error, (facts, note))
    notes = [note for _, note in reports]
    if any(note is not None for note in notes):
        raise Interruption(what, notes)
    group.compare(what, [facts for facts, _ in reports])
    raise RuntimeError(f"{what}: ranks make different calls, but no known fact differs")

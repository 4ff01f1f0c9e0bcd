"""Signatures: whether all ranks make the same call, in one number of 64 bits.

Each rank forms a number from what must be the same on all ranks. The ranks compare
these numbers while the data travel; only if they differ do they exchange the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccum.errors import format_ranks

# The signature of a rank that takes part only to raise.
FAILED = 0


def digest(*facts: object) -> int:
    """Return a hash of 64 bits, the same on all ranks, of facts that have a `repr`."""
    # Imported here, as it is slow.
    import hashlib

    found = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def canonical(number: float) -> float:
    """Return a number of Python, the same for equal numbers of any types."""
    wide = float(number)
    return int(number) if wide.is_integer() else wide


class Interruption(Exception):
    """A call was not made, because ranks called `Reducer.interrupt` in its place.

    Or because a rank is lost that has made another call.

    Attributes:
        notes: What each rank passed that is not lost, by rank; None for one that made
            the call.
    """

    def __init__(self, what: str, notes: Mapping[int, Any]) -> None:
        ranks = [rank for rank, note in notes.items() if note is not None]
        super().__init__(f"{what}: interrupted by {format_ranks(ranks)}")
        self.notes = notes

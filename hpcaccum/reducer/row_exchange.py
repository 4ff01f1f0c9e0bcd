"""Sums of rows over the ranks of a group, each of which has some of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi import MPI
from hpcaccum.row_sums import Rows, merged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]


def sum_rows(group: Group, rows: Mapping[str, Rows], what: str) -> dict[str, Rows]:
    """Return the sums of the rows of all ranks. Collective.

    Every rank gets the rows of every other one. It adds them in rank order, so all
    ranks have the same bits. A count is the number of ranks that have the row.

    Args:
        group: The ranks.
        rows: Those of this rank, under the same names and with the same width and dtype
            on all ranks.
        what: Name for messages.

    Raises:
        WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
    """
    numbers = group.allgather([each.indices.size for each in rows.values()], what)
    return {
        name: _sum(group, each, [counts[number] for counts in numbers], what)
        for number, (name, each) in enumerate(rows.items())
    }


def _sum(group: Group, rows: Rows, numbers: Sequence[int], what: str) -> Rows:
    indices = _gather(group, rows.indices[:, None], numbers, what)[:, 0]
    values = _gather(group, rows.values, numbers, what)
    counts = np.ones(indices.size, np.int64)
    ends = itertools.accumulate(numbers, initial=0)
    places = [slice(*each) for each in itertools.pairwise(ends)]
    return merged([Rows(indices[p], counts[p], values[p]) for p in places])


def _gather(group: Group, own: Array, numbers: Sequence[int], what: str) -> Array:
    """Return the matrices of all ranks, one below the other."""
    own = np.ascontiguousarray(own)
    found = np.empty((sum(numbers), own.shape[1]), own.dtype)
    if not own.shape[1]:
        return found
    # A type of a whole row: MPI libraries before MPI-4 count in 32 bits.
    row = MPI.BYTE.Create_contiguous(own.shape[1] * own.itemsize).Commit()
    try:
        request = group.comm.Iallgatherv([own, len(own), row], [found, numbers, row])
        Deadline(None, what).wait(
            lambda: request.Test() or None, lambda: "the rows of the other ranks"
        )
    finally:
        row.Free()
    return found

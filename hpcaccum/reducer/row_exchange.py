"""Sums of rows over the ranks of a group, each of which has some of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.mpi import MPI, complete
from hpcaccum.row_sums import Rows, merged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group


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
        MemoryError, RuntimeError: On every rank, if one has too little memory.
        WaitTimeoutError: After HPCACCUM_TIMEOUT seconds.
    """
    numbers = group.allgather([each.indices.size for each in rows.values()], what)
    by_name = {name: [each[i] for each in numbers] for i, name in enumerate(rows)}

    def allocate() -> dict[str, tuple[Array, Array]]:
        return {name: _memory(rows[name], sum(by_name[name])) for name in rows}

    # No rank begins to receive before all can.
    memory = group.agree(what, allocate, lambda _: {})
    return {
        name: _sum(group, each, memory[name], by_name[name], what)
        for name, each in rows.items()
    }


def _memory(rows: Rows, number: int) -> tuple[Array, Array]:
    """Return memory for the indices and the values of ``number`` rows."""
    _, width = rows.values.shape
    return np.empty((number, 1), np.int64), np.empty((number, width), rows.values.dtype)


def _sum(
    group: Group,
    rows: Rows,
    memory: tuple[Array, Array],
    numbers: Sequence[int],
    what: str,
) -> Rows:
    indices, values = memory
    _gather(group, rows.indices[:, None], indices, numbers, what)
    _gather(group, rows.values, values, numbers, what)
    counts = np.ones(len(indices), np.int64)
    ends = itertools.accumulate(numbers, initial=0)
    places = [slice(*each) for each in itertools.pairwise(ends)]
    return merged([Rows(indices[p, 0], counts[p], values[p]) for p in places])


def _gather(
    group: Group, own: Array, out: Array, numbers: Sequence[int], what: str
) -> None:
    """Set ``out`` to the matrices of all ranks, one below the other."""
    own = np.ascontiguousarray(own)
    if not own.shape[1]:
        return
    # A type of a whole row: MPI libraries before MPI-4 count in 32 bits.
    row = MPI.BYTE.Create_contiguous(own.shape[1] * own.itemsize).Commit()
    ends = [own, len(own), row], [out, numbers, row]
    begun = map(group.comm.Iallgatherv, *zip(ends, strict=True))
    try:
        deadline = Deadline(None, what)
        complete(begun, deadline, lambda: "the rows of the other ranks", (own, out))
    finally:
        row.Free()

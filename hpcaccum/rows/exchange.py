"""Sums of rows over the ranks of a group, each of which has some of them.

An exchange of rows goes with a reduction of arrays. Before it, a rank offers its rows;
the reduction adds the numbers of rows of all ranks to its arrays, and compares the
call; after it, each rank reads the rows of all. So nothing else is exchanged if all
ranks share a node, and have so few rows that these fit in memory that they share.
Otherwise the rows travel in one message of each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.layout import ALIGNMENT
from hpcaccum.mpi import MPI, Group, NodeMemory, complete, duplicate
from hpcaccum.rows.format import RowFormat, divided
from hpcaccum.rows.sums import Rows, merged

# Bits of a number that one element of a reduction carries. A mean of sums that travel
# as bfloat16, which has 8 bits, must be right after it is rounded.
_BITS = 6
# Bytes in which messages are counted: MPI libraries before MPI-4 count in 32 bits.
_UNIT = ALIGNMENT
# Bytes of rows of a rank that travel through memory which the ranks of a node share.
_MOST_BYTES = 512 << 10


def columns(form: RowFormat) -> int:
    """Return how many elements of a reduction carry a number of rows.

    These are a 1, of which the reduction makes the share of the rank, and the digits.
    """
    return 1 + max(1, -(-form.capacity.bit_length() // _BITS))


class RowExchange:
    """Sums rows of one group, in any number of calls. Collective.

    ``formats`` of the rows are by name, in the same order on all ranks. ``marks`` is
    memory for what the reduction adds, by name: a matrix with a row for each rank, and
    with `columns` columns. `broken` tells whether this rank is in `collect`, or an
    exception has ended it: then no other call can be made.
    """

    def __init__(
        self,
        group: Group,
        formats: Mapping[str, RowFormat],
        marks: Mapping[str, Array],
        name: str,
    ) -> None:
        self._group, self._formats, self._marks = group, formats, marks
        self._what = f"{name}: exchange of rows"
        self._track = group.control.open_track(self._what)
        self.broken = False
        self._powers = {
            name: float(1 << _BITS) ** np.arange(columns(each) - 1)
            for name, each in formats.items()
        }
        # This rank's rows, and those of all ranks that have come in messages.
        self._own = self._received = np.empty(0, np.uint8)
        # Two buffers of each rank, used in turn: a rank that is one call ahead does not
        # overwrite what a slower rank still reads.
        self._buffers: list[list[Array]] = [[], []]
        self._capacity = -1
        if group.single_node and group.size > 1:
            # The words or messages of the reduction order the stores of `offer` on one
            # rank with the loads of `collect` on others.
            most = sum(each.nbytes(each.capacity) for each in formats.values())
            size = self._capacity = min(most, _MOST_BYTES)
            parts = NodeMemory(group, [2 * size] * group.size).parts
            self._buffers = [[p[:size] for p in parts], [p[size:] for p in parts]]
        # MPI pairs its calls by their order, so that nothing else may use it.
        self._comm = duplicate(group.comm)

    def offer(self, rows: Mapping[str, Rows], call: int) -> dict[str, Array]:
        """Make this rank's rows ready; return arrays that the reduction must sum."""
        numbers = {name: each.indices.size for name, each in rows.items()}
        size = self._nbytes(numbers)
        if size <= self._capacity:
            self._own = self._buffers[call % 2][self._group.rank]
        else:
            self._own = _memory(size)
        for name, memory in divided(self._own, self._formats, numbers).items():
            self._formats[name].write(memory, rows[name])
        marks = {name: self._marks[name] for name in numbers}
        for name, mark in marks.items():
            shifts = _BITS * np.arange(len(mark.T) - 1)
            digits = numbers[name] >> shifts & (1 << _BITS) - 1
            mark[self._group.rank] = [1, *digits]
        return marks

    def collect(self, sums: Mapping[str, Array], call: int) -> dict[str, Rows]:
        """Return the sums of the rows of all ranks. Collective.

        They are added in rank order, so that all ranks have the same bits. A count is
        the number of ranks that have the row. An error without `broken` is one of all
        ranks.
        """
        self.broken = True
        by_name = {name: self._numbers(name, each) for name, each in sums.items()}
        numbers = [
            {name: each[rank] for name, each in by_name.items()}
            for rank in range(self._group.size)
        ]
        parts = self._parts([self._nbytes(each) // _UNIT for each in numbers], call)
        rows: dict[str, list[Rows]] = {name: [] for name in sums}
        for part, each in zip(parts, numbers, strict=True):
            for name, piece in divided(part, self._formats, each).items():
                rows[name].append(self._formats[name].rows(piece, each[name]))
        found = {name: merged(each) for name, each in rows.items()}
        self._track.calls += 1
        self.broken = False
        return found

    def _numbers(self, name: str, total: Array) -> list[int]:
        """Return the numbers of rows of all ranks."""
        marks = total[: self._group.size].astype(np.float64)
        # A rank whose gradient is not used has no rows, and hardly a share.
        shares = np.maximum(marks[:, :1], np.finfo(np.float64).tiny)
        digits = np.rint(marks[:, 1:] / shares)
        numbers: list[int] = (digits @ self._powers[name]).astype(int).tolist()
        return numbers

    def _nbytes(self, numbers: Mapping[str, int]) -> int:
        return sum(self._formats[n].nbytes(number) for n, number in numbers.items())

    def _parts(self, units: Sequence[int], call: int) -> Sequence[Array]:
        """Return memory with the rows of each rank."""
        if max(units) * _UNIT <= self._capacity:
            return self._buffers[call % 2]
        if self._group.size == 1 or not any(units):
            return [self._own] * self._group.size
        total = sum(units) * _UNIT
        if total > self._received.size:
            self._grow(total)
        self._gather(units, self._received[:total])
        return np.split(self._received, np.cumsum(units)[:-1] * _UNIT)

    def _grow(self, total: int) -> None:
        """Make room for the rows of all ranks. Collective, and rare."""
        size = max(total, 2 * self._received.size)
        # No rank begins to receive before all can.
        self.broken = False
        self._received = self._group.agree(
            self._what, lambda: _memory(size), lambda _: {}
        )
        self.broken = True

    def _gather(self, units: Sequence[int], out: Array) -> None:
        """Set ``out`` to the rows of all ranks, one after the other."""
        count = units[self._group.rank]
        own, unit = self._own[: count * _UNIT], MPI.BYTE.Create_contiguous(_UNIT)
        unit.Commit()
        request = self._comm.Iallgatherv([own, count, unit], [out, units, unit])
        control, track = self._group.control, self._track
        deadline, track.thread = Deadline(None, self._what), threading.get_ident()
        try:
            complete(
                [request],
                deadline,
                lambda: "the rows of the other ranks",
                (own, out),
                # A rank that has left this call may wait for this one in another.
                lambda: control.check(track, deadline),
            )
        except BaseException:
            control.depart(track)
            raise
        finally:
            unit.Free()

    def free(self) -> None:
        """Release the memory, and free the communicator. Collective."""
        broken = self._group.allgather(self.broken, f"{self._what}: free")
        self._own = self._received = _memory(0)
        self._buffers, self._capacity = [[], []], -1
        self._group.control.close_track(self._track)
        # The messages may still be under way, and MPI may reuse the context id.
        if not any(broken):
            self._comm.Free()


def _memory(size: int) -> Array:
    return np.empty(size, np.uint8)

"""Vectors on their way between two agents, piece by piece."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.mpi import begun, is_complete
from hpcaccum.nodes.agent import Steps

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

# Bytes of a piece. One is added while others travel, so pieces are small beside long
# vectors; a message of this size takes much longer than the steps around it.
_PIECE = 1 << 18
# Pieces of one vector on their way at a time.
_IN_FLIGHT = 4
# Bytes of a vector up to which it is part of another message. One of this size takes
# little longer than an empty one.
SHORT = 1 << 13

# A remainder shorter than this part of a piece is sent with the last piece.
_REST = 1 / 8

# Ranges of a vector that travel together.
Piece = list[slice]


def is_short(nbytes: int) -> bool:
    """Return whether a vector is sent as part of another message."""
    return nbytes <= SHORT


def pieces_of(ranges: Sequence[slice], itemsize: int) -> Iterator[Piece]:
    """Yield the pieces of ranges of a vector; empty ranges are in none."""
    most, rest = _PIECE // itemsize, int(_PIECE * _REST) // itemsize
    left = sum(each.stop - each.start for each in ranges)
    piece, room = Piece(), most
    for each in ranges:
        start = each.start
        while start < each.stop:
            if left <= room + rest:
                room = left
            stop = min(start + room, each.stop)
            piece.append(slice(start, stop))
            room, left, start = room - (stop - start), left - (stop - start), stop
            if not room:
                yield piece
                piece, room = Piece(), most


def pieces_in(vector: Array) -> Iterator[Array]:
    """Yield the pieces of a vector, as views."""
    whole = slice(0, vector.size)
    return (vector[piece[0]] for piece in pieces_of([whole], vector.itemsize))


def length(piece: Piece) -> int:
    """Return the number of elements of a piece."""
    return sum(each.stop - each.start for each in piece)


def buffers_for(ranges: Sequence[slice], dtype: np.dtype[Any]) -> Iterator[Array]:
    """Yield memory for the pieces of ranges; a few vectors take turns."""
    longest = max(map(length, pieces_of(ranges, dtype.itemsize)), default=0)
    vectors = itertools.cycle(np.empty((_IN_FLIGHT, longest), dtype))
    pieces = pieces_of(ranges, dtype.itemsize)
    return (
        vector[: length(piece)] for vector, piece in zip(vectors, pieces, strict=False)
    )


class Narrowing:
    """How vectors travel between nodes in a narrower dtype, all but their ends.

    A piece travels as bytes: what it has of the first ``count`` elements of the vector
    is rounded, the others are as they are. A value that is too large becomes infinity.

    Attributes:
        dtype: Of the vectors.
    """

    def __init__(self, dtype: np.dtype[Any], narrow: np.dtype[Any], count: int) -> None:
        self.dtype, self._narrow, self._count = dtype, narrow, count

    def _parts(self, piece: Piece) -> tuple[int, int]:
        """Return how many elements of a piece are rounded, and their bytes."""
        ends = [(min(each.start, self._count), each.stop) for each in piece]
        rounded = sum(max(0, min(stop, self._count) - start) for start, stop in ends)
        return rounded, rounded * self._narrow.itemsize

    def buffers(self, ranges: Sequence[slice]) -> Iterator[Array]:
        """Yield memory for the pieces of ranges of a vector."""
        for piece in pieces_of(ranges, self.dtype.itemsize):
            rounded, nbytes = self._parts(piece)
            rest = (length(piece) - rounded) * self.dtype.itemsize
            yield np.empty(nbytes + rest, np.uint8)

    def pack(self, values: Array, piece: Piece) -> Array:
        """Return what is sent of the elements of a piece."""
        rounded, _ = self._parts(piece)
        narrow = values[:rounded].astype(self._narrow)
        return np.concatenate([_bytes(narrow), _bytes(values[rounded:])])

    def unpack(self, data: Array, piece: Piece) -> Array:
        """Return the elements of a piece that was received."""
        values = np.empty(length(piece), self.dtype)
        rounded, nbytes = self._parts(piece)
        values[:rounded] = data[:nbytes].view(self._narrow)
        values[rounded:] = data[nbytes:].view(self.dtype)
        return values


def send_pieces(
    comm: mpi4py_MPI.Intracomm, rank: int, tag: int, pieces: Iterator[Array]
) -> Steps:
    """Send a vector to another agent.

    The contents of a piece may overwrite those of the one `_IN_FLIGHT` pieces before,
    as those of `buffers_for` do.
    """
    requests: deque[Any] = deque()
    more = True
    while more or requests:
        if more and len(requests) < _IN_FLIGHT:
            if more := (piece := next(pieces, None)) is not None:
                requests.append(begun(comm.Isend, _bytes(piece), rank, tag))
                yield True
        elif is_complete(requests[0]):
            requests.popleft()
        else:
            yield False


class Incoming:
    """A vector that another agent sends with `send_pieces`, in memory for each piece.

    When the memory for a piece is asked for, that of the one `_IN_FLIGHT` pieces before
    is free.
    """

    def __init__(
        self,
        comm: mpi4py_MPI.Intracomm,
        rank: int,
        tag: int,
        places: Iterator[Array],
    ) -> None:
        self._comm, self._rank, self._tag, self._places = comm, rank, tag, places
        self._receiving: deque[tuple[Any, Array]] = deque()
        for _ in range(_IN_FLIGHT):
            self._receive()

    def _receive(self) -> None:
        if (place := next(self._places, None)) is not None:
            request = begun(self._comm.Irecv, _bytes(place), self._rank, self._tag)
            self._receiving.append((request, place))

    def first(self) -> Array | None:
        """Return the first piece that was not taken; None if it has not arrived."""
        request, place = self._receiving[0]
        return place if is_complete(request, after_failure=False) else None

    def take(self) -> None:
        """Take the first piece, whose memory is free from now on."""
        self._receiving.popleft()
        self._receive()

    def taking(self, is_given_up: Callable[[], bool] = lambda: False) -> Steps:
        """Take all pieces, unless the other agent is given up."""
        while self._receiving and not is_given_up():
            if arrived := self.first() is not None:
                self.take()
            yield arrived


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)

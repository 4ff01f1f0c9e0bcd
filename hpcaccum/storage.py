"""Where admitted gradients lie until they are taken: `Slots` or `Sums`.

Both store in the wide dtype (float32 for half precision), know nothing of rounds, and
may be used by several ranks at once as long as each keeps to its own buffers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.window import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcaccum.group import Group
    from hpcaccum.rounds import Closed

Array = np.ndarray[Any, Any]

# Elements that are summed while they are in the cache.
_CHUNK = 1 << 15


class Slots:
    """Two buffers a rank; a gradient stays apart from those of other ranks.

    The sum is formed at the take, in rank order: the same gradients give the same bits
    whatever the order of arrival.

    Args:
        group: The ranks.
        host: The rank that holds the slots where the ranks do not share a node.
        capacity: Elements of a gradient at most.
        dtype: Wide dtype.
    """

    name = "slots"

    def __init__(
        self, group: Group, host: int, capacity: int, dtype: np.dtype[Any]
    ) -> None:
        self._rank, self._capacity, self._dtype = group.rank, capacity, dtype
        # Buffers begin on a cache line.
        self._stride = -(-capacity * dtype.itemsize // 64) * 64
        self.region = Region(group, host, 2 * self._stride, spread=True)
        self._staging: dict[int, Array] = {}

    def buffer(self, index: int) -> Array:
        """Return this rank's buffer, flat, where a gradient may be computed.

        Across nodes it is memory of this rank that `write` will send from.
        """
        if self.region.direct:
            return self._view(self._rank, index, self._capacity)
        return _staged(self._staging, index, self._capacity, self._dtype)

    def _view(self, rank: int, index: int, count: int) -> Array:
        return self.region.view(rank, index * self._stride, count, self._dtype)

    def write(
        self, parity: int, index: int, grad: Array, *, first: bool, there: bool
    ) -> None:
        """Put a gradient into this rank's buffer, or add it to what is there.

        Args:
            parity: Of the round; slots do not care.
            index: The buffer.
            grad: Of any real dtype and any strides.
            first: Whether the buffer has nothing of this round yet.
            there: Whether ``grad`` is that very `buffer`.
        """
        if self.region.direct and not there:
            self._store(index, grad, first=first)
        if self.region.direct:
            self.region.sync()
            return
        flat = _flat(grad, self._dtype)
        send = self.region.put if first else self.region.accumulate
        send(self._rank, index * self._stride, flat)

    def _store(self, index: int, grad: Array, *, first: bool) -> None:
        place = self._view(self._rank, index, grad.size).reshape(grad.shape)
        # Infinity is for the user to see, as the value that it is.
        with np.errstate(all="ignore"):
            if first:
                np.copyto(place, grad, casting="same_kind")
            else:
                # Converted first, then added, as a lone gradient is.
                np.add(place, grad, place, dtype=self._dtype, casting="same_kind")

    def total(self, closed: Closed, size: int) -> Array:
        """Return the sum of a round's gradients, a new vector of ``size`` elements."""
        self.region.sync()
        records = closed.records.items()
        out = np.empty(size, self._dtype)
        if self.region.direct:
            parts = [self._view(rank, record.buffer, size) for rank, record in records]
            add_in_order(parts, out)
            return out
        scratch = out
        for number, (rank, record) in enumerate(records):
            self.region.get(rank, record.buffer * self._stride, scratch)
            if number:
                out += scratch
            else:
                scratch = np.empty_like(out)
        return out

    def clear(self, parity: int, size: int) -> None:
        """Nothing to do: the first gradient of a round overwrites."""

    def free(self) -> None:
        """Free the window. Collective."""
        self._staging.clear()
        self.region.free()


class Sums:
    """Two sums on the host, to which MPI_Accumulate adds; in order of arrival.

    2 gradients of memory on the host, none elsewhere, however many ranks there are.
    """

    name = "sum"

    def __init__(
        self, group: Group, host: int, capacity: int, dtype: np.dtype[Any]
    ) -> None:
        self._capacity, self._dtype = capacity, dtype
        self._stride = -(-capacity * dtype.itemsize // 64) * 64
        self.region = Region(group, host, 2 * self._stride, spread=False)
        self._staging: dict[int, Array] = {}

    def buffer(self, index: int) -> Array:
        """Return memory of this rank in which a gradient may be computed."""
        return _staged(self._staging, index, self._capacity, self._dtype)

    def write(
        self, parity: int, index: int, grad: Array, *, first: bool, there: bool
    ) -> None:
        """Add a gradient to the sum of a parity; complete on return."""
        flat = _flat(grad, self._dtype)
        self.region.accumulate(0, parity * self._stride, flat)

    def total(self, closed: Closed, size: int) -> Array:
        """Return the sum of a round's gradients, a new vector of ``size`` elements."""
        out = np.empty(size, self._dtype)
        self.region.get(0, closed.parity * self._stride, out)
        return out

    def clear(self, parity: int, size: int) -> None:
        """Make the sum of a parity zero."""
        self.region.put(0, parity * self._stride, np.zeros(size, self._dtype))

    def free(self) -> None:
        """Free the window. Collective."""
        self._staging.clear()
        self.region.free()


def choose(storage: str, group: Group, host: int, nbytes: int) -> str:
    """Return what ``"auto"`` means here. Collective.

    Slots if all ranks share a node, or if two gradients a rank take at most half of
    the memory that the host has free.
    """
    if storage != "auto":
        return storage
    if group.single_node:
        return Slots.name
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = 2 * nbytes * group.size <= pages // 2
    return Slots.name if group.comm.bcast(fits, host) else Sums.name


def _flat(grad: Array, dtype: np.dtype[Any]) -> Array:
    """Return a gradient as a contiguous vector of ``dtype``."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(grad, dtype).reshape(-1)


def add_in_order(parts: Sequence[Array], out: Array) -> None:
    """Set ``out`` to the sum of vectors, from the first to the last, by chunks."""
    for start in range(0, out.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        if len(parts) == 1:
            np.copyto(out[piece], parts[0][piece])
            continue
        np.add(parts[0][piece], parts[1][piece], out=out[piece])
        for part in parts[2:]:
            np.add(out[piece], part[piece], out=out[piece])


def divide(total: Array, count: int) -> Array:
    """Divide a vector in place by a count, as one true division in its dtype."""
    if count != 1:
        np.divide(total, total.dtype.type(count), out=total)
    return total


def _staged(
    staging: dict[int, Array], index: int, capacity: int, dtype: np.dtype[Any]
) -> Array:
    """Return memory of this rank, made when it is first asked for."""
    if index not in staging:
        staging[index] = np.zeros(capacity, dtype)
    return staging[index]

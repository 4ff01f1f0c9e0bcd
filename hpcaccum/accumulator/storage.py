"""Where admitted gradients lie until they are taken: `Slots` or `Sums`.

Both store in the wide dtype (float32 for half precision), know nothing of rounds, and
may be used by several ranks at once as long as each keeps to its own buffers.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.mpi import Region, without_signals
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]


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
        # Whether MPI sends what `write` gets.
        self.sends = not self.region.mapped
        self._threads = group.own_cores
        self._staging: dict[int, Array] = {}
        # This rank's buffers, once it brought a gradient of a device.
        self._pinned: device.Pinned | None = None

    def pin(self) -> None:
        """Let the device reach this rank's buffers by itself; only if they are here."""
        if self._pinned is None and self.region.mapped:
            nbytes, whole = 2 * self._stride, np.dtype(np.uint8)
            memory = self.region.view(self._rank, 0, nbytes, whole)
            self._pinned = device.Pinned(memory)

    def buffer(self, index: int) -> Array:
        """Return this rank's buffer, flat, where a gradient may be computed.

        Across nodes it is memory of this rank that `write` will send from, also on the
        host: the caller may use it after `free`, which a window would not survive.
        """
        if self.region.mapped:
            return self._view(self._rank, index, self._capacity)
        return _staged(self._staging, index, self._capacity, self._dtype)

    def _view(self, rank: int, index: int, count: int) -> Array:
        return self.region.view(rank, index * self._stride, count, self._dtype)

    def prepare(self, grad: Array) -> Array:
        """Return what `write` is to get: across nodes a vector that MPI can send."""
        if device.is_device(grad):
            self.pin()
        return grad if self.region.mapped else _flat(grad, self._dtype)

    def write(
        self,
        parity: int,
        index: int,
        grad: Array,
        first: bool,
        there: bool,
        added: list[None],
    ) -> None:
        """Put a gradient into this rank's buffer, or add it to what is there.

        Args:
            parity: Of the round; slots do not care.
            index: The buffer.
            grad: What `prepare` returned.
            first: Whether the buffer has nothing of this round yet.
            there: Whether ``grad`` is that very `buffer`.
            added: Gets an entry for each part that was added to a sum. If it has some
                after an exception, a second call with the same list adds the rest.
        """
        if not self.region.mapped:
            offset = index * self._stride
            if first:
                self.region.put(self._rank, offset, grad)
            else:
                self.region.accumulate(self._rank, offset, grad, added)
            return
        if not there:
            self._store(index, grad, first, added)

    def _store(self, index: int, grad: Array, first: bool, added: list[None]) -> None:
        place = self._view(self._rank, index, grad.size).reshape(grad.shape)
        # Infinity is for the user to see, as the value that it is.
        with np.errstate(all="ignore"):
            if first:
                device.copyto(place, grad)
            elif not added:
                # Converted first, then added, as a lone gradient is.
                add = functools.partial(
                    np.add,
                    place,
                    device.to_host(grad),
                    place,
                    dtype=self._dtype,
                    casting="same_kind",
                )
                without_signals(add, functools.partial(added.append, None))

    def total(self, closed: Closed, divisor: int, out: Array) -> None:
        """Set a vector to the sum of a round's gradients, over ``divisor``.

        On one node every gradient is read once, where it lies, and the result written
        once.
        """
        self.region.sync()
        records, size = closed.records.items(), out.size
        if self.region.direct:
            parts = [self._view(rank, record.buffer, size) for rank, record in records]
            add_in_order(parts, out, divisor, self._threads)
            return
        total, part = np.empty(size, self._dtype), np.empty(size, self._dtype)
        for number, (rank, record) in enumerate(records):
            place = part if number else total
            self.region.get(rank, record.buffer * self._stride, place)
            if number:
                total += part
        add_in_order([total], out, divisor, self._threads)

    def clear(self, parity: int, size: int) -> None:
        """Nothing to do: the first gradient of a round overwrites."""

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._staging.clear()
        self.region.free()


class Sums:
    """Two sums on the host, to which MPI_Accumulate adds; in order of arrival.

    2 gradients of memory on the host, none elsewhere, however many ranks there are.
    """

    name, sends = "sum", True

    def __init__(
        self, group: Group, host: int, capacity: int, dtype: np.dtype[Any]
    ) -> None:
        self._capacity, self._dtype = capacity, dtype
        self._stride = -(-capacity * dtype.itemsize // 64) * 64
        nbytes = 2 * self._stride
        self.region = Region(group, host, nbytes, spread=False, window=True)
        self._threads = group.own_cores
        self._staging: dict[int, Array] = {}

    def buffer(self, index: int) -> Array:
        """Return memory of this rank in which a gradient may be computed."""
        return _staged(self._staging, index, self._capacity, self._dtype)

    def pin(self) -> None:
        """Nothing to do: gradients are converted on their way."""

    def prepare(self, grad: Array) -> Array:
        """Return what `write` is to get: a vector that MPI can send."""
        return _flat(grad, self._dtype)

    def write(
        self,
        parity: int,
        index: int,
        grad: Array,
        first: bool,
        there: bool,
        added: list[None],
    ) -> None:
        """Add a gradient to the sum of a parity; see `Slots.write`."""
        self.region.accumulate(0, parity * self._stride, grad, added)

    def total(self, closed: Closed, divisor: int, out: Array) -> None:
        """Set a vector to the sum of a round's gradients, over ``divisor``."""
        offset = closed.parity * self._stride
        if self.region.direct:
            self.region.sync()
            total = self.region.view(0, offset, out.size, self._dtype)
        else:
            total = np.empty(out.size, self._dtype)
            self.region.get(0, offset, total)
        add_in_order([total], out, divisor, self._threads)

    def clear(self, parity: int, size: int) -> None:
        """Make the sum of a parity zero."""
        offset = parity * self._stride
        if self.region.direct:
            self.region.view(0, offset, size, self._dtype)[:] = 0
            self.region.sync()
        else:
            self.region.put(0, offset, np.zeros(size, self._dtype))

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
        return np.ascontiguousarray(device.to_host(grad), dtype).reshape(-1)


def _staged(
    staging: dict[int, Array], index: int, capacity: int, dtype: np.dtype[Any]
) -> Array:
    """Return memory of this rank, made when it is first asked for."""
    if index not in staging:
        staging[index] = np.zeros(capacity, dtype)
    return staging[index]

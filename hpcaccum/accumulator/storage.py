"""Where admitted gradients are stored until they are taken: `Slots` or `Sums`.

Both store in the accumulation dtype (float32 for half precision), know nothing of the
protocol, and may be used by several ranks at once if each uses its own buffers only.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import Region, without_signals
from hpcaccum.summation import add_in_order

if TYPE_CHECKING:
    from hpcaccum.accumulator.state import Closed
    from hpcaccum.mpi import Group

Array = np.ndarray[Any, Any]


class Slots:
    """Two buffers per rank; the gradients of different ranks are stored separately.

    The sum is formed at the take, in rank order: the same gradients give the same bits
    in any order of arrival.

    Args:
        group: The ranks.
        root: The rank that has all slots if the ranks are on several nodes.
        capacity: Maximum number of elements of a gradient.
        dtype: Accumulation dtype.

    Attributes:
        region: The memory of the slots.
        sends: Whether MPI sends what `write` gets.
    """

    name = "slots"

    def __init__(
        self, group: Group, root: int, capacity: int, dtype: np.dtype[Any]
    ) -> None:
        self._rank, self._capacity, self._dtype = group.rank, capacity, dtype
        self._stride = _aligned(capacity * dtype.itemsize)
        self.region = Region(group, root, 2 * self._stride, spread=True)
        self.sends = not self.region.mapped
        self._threads = group.own_cores
        self._staging: dict[int, Array] = {}
        # This rank's buffers, after its first gradient from a device.
        self._pinned: device.Pinned | None = None

    def pin(self) -> None:
        """Pin this rank's buffers for DMA; a no-op if they are on another node."""
        if self._pinned is None and self.region.mapped:
            nbytes, whole = 2 * self._stride, np.dtype(np.uint8)
            memory = self.region.view(self._rank, 0, nbytes, whole)
            self._pinned = device.Pinned(memory)

    def buffer(self, index: int) -> Array:
        """Return this rank's buffer as a vector, in which a gradient may be computed.

        Across nodes it is memory of this rank from which `write` sends, also on the
        root: the caller may use it after `free`, and the memory of a window is gone by
        then.
        """
        if self.region.mapped:
            return self._view(self._rank, index, self._capacity)
        return _staged(self._staging, index, self._capacity, self._dtype)

    def _view(self, rank: int, index: int, count: int) -> Array:
        return self.region.view(rank, index * self._stride, count, self._dtype)

    def prepare(self, grad: Array) -> Array:
        """Return the argument for `write`: across nodes a vector that MPI can send."""
        if device.is_device(grad):
            self.pin()
        return grad if self.region.mapped else _flat(grad, self._dtype)

    def write(
        self,
        parity: int,
        index: int,
        grad: Array,
        first: bool,
        in_place: bool,
        added: list[None],
    ) -> None:
        """Store a gradient in this rank's buffer, or add it to the sum there.

        Args:
            parity: Of the round; unused.
            index: The buffer.
            grad: What `prepare` returned.
            first: Whether the buffer has no gradient of this round yet.
            in_place: Whether ``grad`` is the `buffer` itself.
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
        if not in_place:
            self._store(index, grad, first, added)

    def _store(self, index: int, grad: Array, first: bool, added: list[None]) -> None:
        place = self._view(self._rank, index, grad.size).reshape(grad.shape)
        # No warning: an overflow shows up as inf in the result.
        with np.errstate(all="ignore"):
            if first:
                device.copyto(place, grad)
            elif not added:
                # Converted before the addition, as a single gradient is.
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
        """Set a vector to the sum of a round's gradients, divided by ``divisor``.

        On one node every gradient is read once, from its slot, and the result is
        written once.
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
        """Do nothing: the first gradient of a round overwrites."""

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._staging.clear()
        self.region.free()


class Sums:
    """Two sums on the root, to which MPI_Accumulate adds in the order of arrival.

    They take the memory of two gradients on the root and none on other ranks, for any
    number of ranks. The arguments and attributes are those of `Slots`.
    """

    name, sends = "sum", True

    def __init__(
        self, group: Group, root: int, capacity: int, dtype: np.dtype[Any]
    ) -> None:
        self._capacity, self._dtype = capacity, dtype
        self._stride = _aligned(capacity * dtype.itemsize)
        nbytes = 2 * self._stride
        self.region = Region(group, root, nbytes, spread=False, window=True)
        self._threads = group.own_cores
        self._staging: dict[int, Array] = {}

    def buffer(self, index: int) -> Array:
        """Return memory of this rank in which a gradient may be computed."""
        return _staged(self._staging, index, self._capacity, self._dtype)

    def pin(self) -> None:
        """Do nothing: a gradient is converted before it is sent."""

    def prepare(self, grad: Array) -> Array:
        """Return the argument for `write`: a vector that MPI can send."""
        return _flat(grad, self._dtype)

    def write(
        self,
        parity: int,
        index: int,
        grad: Array,
        first: bool,
        in_place: bool,
        added: list[None],
    ) -> None:
        """Add a gradient to the sum of a parity; see `Slots.write`."""
        self.region.accumulate(0, parity * self._stride, grad, added)

    def total(self, closed: Closed, divisor: int, out: Array) -> None:
        """Set a vector to the sum of a round's gradients, divided by ``divisor``."""
        offset = closed.parity * self._stride
        if self.region.direct:
            self.region.sync()
            total = self.region.view(0, offset, out.size, self._dtype)
        else:
            total = np.empty(out.size, self._dtype)
            self.region.get(0, offset, total)
        add_in_order([total], out, divisor, self._threads)

    def clear(self, parity: int, size: int) -> None:
        """Set the sum of a parity to zero."""
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


Storage = Slots | Sums


def make_storage(
    kind: str, group: Group, root: int, capacity: int, dtype: np.dtype[Any]
) -> Storage:
    """Return a new storage. Collective.

    Args:
        kind: ``"slots"``, ``"sum"`` or ``"auto"``.
        group: The ranks.
        root: The rank that has the memory if the ranks are on several nodes.
        capacity: Maximum number of elements of a gradient.
        dtype: Of the gradients.
    """
    dtype = accumulation_dtype(dtype)
    kind = choose(kind, group, root, capacity * dtype.itemsize)
    make = Slots if kind == Slots.name else Sums
    return make(group, root, capacity, dtype)


def choose(kind: str, group: Group, root: int, nbytes: int) -> str:
    """Return the kind of storage that ``"auto"`` selects. Collective.

    Slots if all ranks share a node, or if two gradients of ``nbytes`` for each rank
    take at most half of the free memory of the root.
    """
    if kind != "auto":
        return kind
    if group.single_node:
        return Slots.name
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = 2 * nbytes * group.size <= free // 2
    return Slots.name if group.comm.bcast(fits, root) else Sums.name


def _aligned(nbytes: int) -> int:
    """Round up to whole cache lines, so that the second buffer begins on one."""
    return -(-nbytes // 64) * 64


def _flat(grad: Array, dtype: np.dtype[Any]) -> Array:
    """Return a gradient as a contiguous vector of ``dtype``."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(device.to_host(grad), dtype).reshape(-1)


def _staged(
    staging: dict[int, Array], index: int, capacity: int, dtype: np.dtype[Any]
) -> Array:
    """Return memory of this rank, allocated at the first use."""
    if index not in staging:
        staging[index] = np.zeros(capacity, dtype)
    return staging[index]

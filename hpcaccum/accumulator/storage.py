"""Where admitted gradients are stored until they are taken: `Buffers` or `Sums`.

A storage stores in the accumulation dtype (float32 for half precision), knows nothing
of the protocol, and may be used by several ranks at once if each uses its own buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.batch import Batch
from hpcaccum.accumulator.settings import ROWS, SLOTS, SUM, Settings
from hpcaccum.accumulator.state import Closed, Record
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array, accumulation_dtype, quiet
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group, Region
from hpcaccum.nodes import NodeParts, Place, is_short
from hpcaccum.rows import (
    IndexedSlices,
    RowFormat,
    RowPlace,
    Rows,
    matrix,
    merged,
    rows_of,
    weighted,
)
from hpcaccum.spans import traced
from hpcaccum.summation import add_in_order, fill


class Buffers:
    """Two buffers of each rank on its node, for gradients that are vectors.

    A vector may have places of rows at its end. If a rank has several gradients in a
    round, its buffer has their sum, each multiplied by its weight: rows are added by
    their indices, all other elements one by one. `Record` says when a single one is
    multiplied. The take adds the buffers of all ranks; what takes rows adds rows.

    ``size`` is the number of elements of a buffer, by default of the longest gradient.

    Attributes:
        parts: The memory of all buffers.
        has_rows: Whether a gradient may need more room than a buffer has.
    """

    def __init__(
        self, group: Group, settings: Settings, what: str, size: int | None = None
    ) -> None:
        self._rank, self._rows = group.rank, settings.rows
        self.has_rows = bool(settings.rows)
        self._dtype = accumulation_dtype(settings.dtype)
        self._capacity = settings.capacity if size is None else size
        self._stride = _aligned(self._capacity * self._dtype.itemsize)
        self.parts = NodeParts(group, 2 * self._stride, what, longest=self._stride)
        # This rank's buffers.
        self._own = [
            self.parts.view(Place(group.rank, begin), self._capacity, self._dtype)
            for begin in (0, self._stride)
        ]
        # Whether the agent of this node may have copies.
        self._has_copies = self.parts.is_here(settings.host)
        self._threads = group.own_cores
        # This rank's buffers, after its first gradient from a device.
        self._pinned: device.Pinned | None = None

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's memory that hold gradients."""
        return self.parts.nbytes_here

    def pin(self) -> None:
        """Pin this rank's buffers for DMA."""
        if self._pinned is None:
            self._pinned = device.Pinned(self.parts.own)

    def clear(self, parity: int, size: int | None) -> None:
        """Do nothing: the first gradient of a round overwrites."""

    def free(self) -> None:
        """Free the memory. Collective."""
        if self._pinned is not None:
            self._pinned.free()
        self._own.clear()
        self.parts.free()

    def buffer(self, index: int) -> Array:
        """Return this rank's buffer as a vector, in which a gradient may be computed.

        The caller may use it after `free`.
        """
        return self._own[index]

    def prepare(self, grad: Any, weight: float) -> None:
        """Prepare `write`, for a gradient that may be dropped."""
        if device.is_device(grad):
            self.pin()

    def check_room(self, index: int, grad: Any, joins: Callable[[], bool]) -> None:
        """Raise InvalidArgumentError if a buffer has no room for another gradient.

        ``joins`` returns whether it is added to what is in the buffer; slow.
        """
        for place, rows in self._rows_of(grad):
            held, room = place.rows(self._own[index]).indices, place.form.capacity
            # Surely, if they have no row in common.
            if held.size + rows.indices.size <= room or not joins():
                continue
            number = np.union1d(held, rows.indices).size
            if number > room:
                raise InvalidArgumentError(
                    f"{self._label(place)}: the gradients of a rank in one round have "
                    f"at most {room} different rows (capacity=); those of rank "
                    f"{self._rank} would have {number}"
                )

    def _rows_of(self, grad: Any) -> list[tuple[RowPlace, Rows]]:
        return [(place, place.rows(grad)) for place in self._rows]

    def _label(self, place: RowPlace) -> str:
        return f"gradients of {place.name!r}"

    @traced("copy")
    def write(
        self, parity: int, index: int, grad: Any, weight: float, before: Record | None
    ) -> None:
        """Store a gradient in this rank's buffer, or add it to what the buffer has.

        ``before`` is what the buffer has of the round; None if nothing.
        """
        buffer = self._own[index][: grad.size]
        if before is None:
            # The take multiplies what has rows.
            _store(buffer, grad, 1.0 if self._rows else weight)
            return
        more, factors = device.to_host(grad).reshape(-1), (before.factor, weight)
        with quiet():
            for place, rows in self._rows_of(more):
                parts = [place.rows(buffer), rows]
                place.write(buffer, merged([*map(weighted, parts, factors)]))
            if self._rows:
                begin = self._rows[0].begin
                buffer, more = buffer[:begin], more[:begin]
            # Converted before the addition, as a single gradient is.
            add_in_order([buffer, more], buffer, factors=factors)

    def lost(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks whose buffers are on a node that is lost."""
        parts = self.parts
        return set() if parts.mapped else {*filter(parts.is_lost, ranks)}

    def total(self, closed: Closed, out: Array, deadline: Deadline) -> None:
        """Set a vector to the sum or mean of a round's gradients, by their weights."""
        if closed.total is not None:
            total: Array = np.frombuffer(closed.total, self._dtype)
            add_in_order([total], out, closed.divisor)
            return
        self.batch(closed).total(out, deadline, self._threads)

    def short_total(self, closed: Closed) -> bytes | None:
        """Return the sum of a round's gradients, if an agent may send it; else None."""
        batch, count = self.batch(closed), math.prod(closed.shape)
        return self.parts.short_sum(batch.places, count, self._dtype, batch.copied)

    def batch(self, closed: Closed) -> Batch:
        """Return the gradients of a round, which stay where they are."""
        places, copied = [], []
        for rank, record in closed.records.items():
            begin = record.buffer * self._stride
            places.append(Place(rank, begin, record.factor))
            if record.copied and self._has_copies:
                copied.append(rank)
        about = closed.divisor, closed.step, copied
        return Batch(self.parts, places, self._dtype, *about)

    def short(self, grad: Any) -> bytes | None:
        """Return a gradient in the dtype of buffers, if it may be sent at once."""
        if not self.parts.is_sent(self._capacity * self._dtype.itemsize):
            return None
        with quiet():
            return np.asarray(device.to_host(grad), self._dtype).tobytes()

    def keep(self, rank: int, index: int, contents: bytes) -> None:
        """Store what `short` returned in this rank's buffer, or keep another one's."""
        if rank == self._rank:
            data: Array = np.frombuffer(contents, self._dtype)
            self._own[index][: data.size] = data
        else:
            self.parts.keep(Place(rank, index * self._stride), contents)


@dataclass(frozen=True)
class RowGradient:
    """A gradient on its way into an accumulator of rows, in the accumulation dtype."""

    slices: IndexedSlices
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        shape: tuple[int, ...] = self.slices.values.shape[1:]
        return shape

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows, of which repeated ones are added.

        Values on a device remain there unless a row is repeated: additions on a device
        have no fixed order, so the host makes them.
        """
        slices = self.slices
        if not slices.on_device:
            return rows_of(slices, self.dtype)
        indices, values = device.to_host(slices.indices), matrix(slices.values)
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        if (ordered[1:] == ordered[:-1]).any():
            return rows_of(slices, self.dtype)
        if not (order[1:] > order[:-1]).all():
            values = values[device.cupy().asarray(order)]
        return Rows(ordered, np.ones(ordered.size), values)


class RowBuffers(Buffers):
    """`Buffers` of gradients that are rows only, of any width up to a maximum."""

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        capacity, width = settings.capacity, settings.row_size
        form = RowFormat(capacity, width, accumulation_dtype(settings.dtype), True)
        self._what, self._whole = what, RowPlace("rows", 0, form)
        super().__init__(group, settings, what, self._whole.end)
        self.has_rows = True
        # Nobody adds them element by element.
        self.parts.sends_short = False

    def _of_width(self, width: int) -> RowPlace:
        """Return the place of rows of so many elements."""
        return self._whole._replace(form=self._whole.form._replace(width=width))

    def _rows_of(self, grad: RowGradient) -> list[tuple[RowPlace, Rows]]:
        return [(self._whole, grad.rows)]

    def _label(self, place: RowPlace) -> str:
        return self._what

    def prepare(self, grad: RowGradient, weight: float) -> None:
        """Prepare `write`; see `Buffers.prepare`."""
        if grad.slices.on_device:
            self.pin()

    @traced("copy")
    def write(
        self, parity: int, index: int, grad: Any, weight: float, before: Record | None
    ) -> None:
        """Store rows in this rank's buffer, or add them; see `Buffers.write`."""
        buffer, rows = self._own[index], grad.rows
        place = self._of_width(rows.values.shape[1])
        if before is None:
            place.write(buffer, rows, device.copyto)
            return
        rows = rows._replace(values=device.to_host(rows.values))
        parts, factors = [place.rows(buffer), rows], (before.factor, weight)
        with quiet():
            place.write(buffer, merged([*map(weighted, parts, factors)]))

    def total_rows(self, closed: Closed, width: int, deadline: Deadline) -> Rows:
        """Return the sum of a round's gradients; that of one may lie in its buffer."""
        return merged(self.batch(closed).rows(self._of_width(width), deadline))


class Sums:
    """Two sums on the root, to which MPI_Accumulate adds in the order of arrival.

    Between nodes they are on the first rank of its node. They take the memory of two
    gradients there and none on other ranks, for any number of ranks. The methods are
    those of `Buffers`.
    """

    has_rows = False

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        self._capacity = settings.capacity
        self._dtype = accumulation_dtype(settings.dtype)
        self._stride = _aligned(self._capacity * self._dtype.itemsize)
        # Where the agent of the root's node reaches them.
        leader = group.nodes[group.node_of[settings.host]][0]
        holder = settings.host if group.single_node else leader
        self._region = Region(group, holder, 2 * self._stride)
        self._threads = group.own_cores
        self._staging: dict[int, Array] = {}
        # What MPI adds, if that is not a gradient itself.
        self._product: Array | None = None

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's memory that hold gradients."""
        return self._region.nbytes_here

    def buffer(self, index: int) -> Array:
        """Return memory of this rank in which a gradient may be computed."""
        if index not in self._staging:
            self._staging[index] = np.zeros(self._capacity, self._dtype)
        return self._staging[index]

    def prepare(self, grad: Any, weight: float) -> None:
        """Allocate what `write` needs."""
        if self._product is None and not self._is_exact(grad, weight):
            self._product = np.empty(self._capacity, self._dtype)

    def _is_exact(self, grad: Any, weight: float) -> bool:
        """Whether MPI can add a gradient itself."""
        return (
            weight == 1
            and isinstance(grad, np.ndarray)
            and grad.dtype == self._dtype
            and grad.flags.c_contiguous
        )

    @traced("copy")
    def write(
        self, parity: int, index: int, grad: Any, weight: float, before: Record | None
    ) -> None:
        """Add a gradient to the sum of a parity; see `Buffers.write`."""
        if self._is_exact(grad, weight):
            vector = grad.reshape(-1)
        else:
            assert self._product is not None
            vector = self._product[: grad.size]
            _store(vector, grad, weight)
        self._region.accumulate(parity * self._stride, vector)

    def total(self, closed: Closed, out: Array, deadline: Deadline) -> None:
        """Set a vector to the sum or mean of a round's gradients, by their weights."""
        if closed.total is not None:
            total: Array = np.frombuffer(closed.total, self._dtype)
        elif self._region.direct:
            total = self._view(closed.parity, out.size)
        else:
            total = np.empty(out.size, self._dtype)
            self._region.get(closed.parity * self._stride, total)
        add_in_order([total], out, closed.divisor, self._threads)

    def _view(self, parity: int, count: int) -> Array:
        self._region.sync()
        return self._region.view(parity * self._stride, count, self._dtype)

    def short_total(self, closed: Closed) -> bytes | None:
        """Return the sum of a round's gradients, if an agent may send it; else None."""
        count = math.prod(closed.shape)
        if not is_short(count * self._dtype.itemsize):
            return None
        return self._view(closed.parity, count).tobytes()

    def short(self, grad: Any) -> None:
        """Return None: every gradient is added one-sidedly."""

    def keep(self, rank: int, index: int, contents: bytes) -> None:
        """Do nothing: as `short`."""

    def check_room(self, index: int, grad: Any, joins: Callable[[], bool]) -> None:
        """Do nothing: gradients have no rows."""

    def lost(self, ranks: Iterable[int]) -> set[int]:
        """Return no rank: all gradients are on the root."""
        return set()

    def clear(self, parity: int, size: int | None) -> None:
        """Set the first elements of the sum of a parity to zero; None: all."""
        offset, size = parity * self._stride, size or self._capacity
        if self._region.direct:
            self._region.view(offset, size, self._dtype)[:] = 0
            self._region.sync()
        else:
            self._region.put(offset, np.zeros(size, self._dtype))

    def free(self) -> None:
        """Free the window. Collective."""
        self._staging.clear()
        self._product = None
        self._region.free()


Storage = Buffers | Sums


def make_storage(group: Group, settings: Settings, what: str) -> Storage:
    """Return a new storage. Collective."""
    kinds: dict[str, type[Storage]] = {SLOTS: Buffers, ROWS: RowBuffers, SUM: Sums}
    return kinds[settings.storage](group, settings, what)


def _store(vector: Array, grad: Any, weight: float) -> None:
    """Set a vector to a gradient times its weight."""
    whole = vector.reshape(grad.shape)
    if weight == 1 or device.is_device(grad):
        device.copyto(whole, grad)
        grad = whole
    if weight != 1:
        fill(whole, grad, weight)


def _aligned(nbytes: int) -> int:
    """Round up to whole cache lines, so that the second buffer begins on one."""
    return -(-nbytes // 64) * 64

"""Copies of parameters between a center, those that are published, and variables.

Of a sparse variable, only rows are copied that have changed. The publisher keeps which
rows each copy of its `DoubleBuffer` lacks. A rank finds those that its variables lack
in a `RowLog`; if it is so far behind that they are overwritten there, it copies all.
Each node has a log and two copies of its own. The agent of the publisher's node finds
in its log which rows to send to another one, in a message of bytes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.device import copy_quietly
from hpcaccum.dtypes import Array
from hpcaccum.layout import ALIGNMENT
from hpcaccum.mpi import Group
from hpcaccum.rows import RowLog
from hpcaccum.server.double_buffer import DoubleBuffer, writer_inside
from hpcaccum.server.wire_format import WireFormat

# Rows of a variable, None for all, and their values.
Part = tuple[Array | None, Array]

# The place of a node that has nothing yet.
NOTHING = -1


# The log has an entry for every eighth row: to copy a random row of 64 floats takes 8
# times as long as to copy one of all, of 256 floats 4 times, of 16 floats 27 times.
SHARE = 8
# Elements of rows that are copied by one call of NumPy, which stay in the cache.
_CHUNK = 1 << 16
# Bytes that an agent copies before it does something else, such as to admit a gradient.
_STEP = 1 << 20


class Message:
    """Parameters for other nodes, all of a vector; a `RowMessage` has rows.

    Attributes:
        since: The place before which the nodes have all changes.
        data: Bytes, once it is complete; before, memory that is not used any more.
        version: Of the parameters.
        place: Which changes a node has with it.
        users: How many nodes it is being sent to.
    """

    def __init__(
        self,
        since: int,
        data: Array | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.since, self.place, self._dtype = since, NOTHING, dtype
        self.data = np.empty(0, np.uint8) if data is None else data
        self.version, self.users = -1, 0

    def reading(self, flat: Array) -> Iterator[bool]:
        """Copy what the nodes lack, in short steps.

        Called again, with the newest vector, until no update has overwritten the vector
        meanwhile.
        """
        dtype = flat.dtype if self._dtype is None else self._dtype
        if not self.data.size:
            self.data = np.empty(flat.size * dtype.itemsize, np.uint8)
        yield from copying(flat, self.data.view(dtype))

    def complete(self, version: int) -> None:
        """Say that all of the last reading was of a version."""
        self.version = version


class Copier:
    """Copies parameters between a center, published vectors and variables. Collective.

    If variables are sparse, a published vector ends with the place in the node's log up
    to which it has all changes, so both are valid together.

    Attributes:
        size, dtype: Of such a vector.
        sent: The dtype in which other nodes are sent it: its own if variables are
            sparse, else ``narrow`` if that is given.
        names: Of all variables, in the order of the vector.
        tables: The numbers in the log of the rows of each sparse variable.
        whole: Whether each message is all of a vector, whatever a node has.
    """

    _log: RowLog

    def __init__(
        self,
        wire: WireFormat,
        group: Group | None = None,
        root: int = 0,
        narrow: np.dtype[Any] | None = None,
    ) -> None:
        self._wire, self.names = wire, list(wire.parameters)
        self.size, self.dtype = wire.parameters.size, wire.parameters.dtype
        self.sent = self.dtype if narrow is None or wire.rows else narrow
        self.tables: dict[str, range] = {}
        first = 0
        for place in wire.rows:
            number = wire.parameters.shapes[place.name][0]
            self.tables[place.name] = range(first, first + number)
            first += number
        self._number_of_rows = first
        # On the rank that writes the copies of its node, by copy: rows that it lacks,
        # of each update; None for all.
        self._lacks: list[list[Array] | None] = [None, None]
        self.whole = not wire.rows
        if group is not None and wire.rows:
            self.size += ALIGNMENT // self.dtype.itemsize
            self._log = RowLog(*writer_inside(group, root), first // SHARE)

    # The root

    def note(self, changed: Mapping[str, Array]) -> None:
        """Note rows of sparse variables, by name, before they change; the root only."""
        rows = [array + self.tables[name].start for name, array in changed.items()]
        if not rows:
            return
        together = np.concatenate(rows)
        for lacks in self._lacks:
            if lacks is not None:
                lacks.append(together)
        self._log.append(together)

    def write(self, center: Mapping[str, Array], flat: Array, copy: int) -> None:
        """Bring a published vector up to date; the root only."""
        if self.whole:
            for name, view in self.views(flat).items():
                copy_quietly(view, center[name])
            return
        self._copy_lacked(center, flat, copy)
        self._complete(flat, copy)

    def _copy_lacked(self, source: Mapping[str, Array], flat: Array, copy: int) -> None:
        """Copy what a copy lacks of variables."""
        lacks, views = self._lacks[copy], self.views(flat)
        rows = None if lacks is None else _united(lacks)
        for name, array in source.items():
            copy_rows(array, views[name], self.rows_of(name, rows))

    def _complete(self, flat: Array, copy: int) -> None:
        # The values before the place: an agent relies on it, see `RowMessage.reading`.
        self._log.sync()
        self._end(flat)[...] = self._log.end
        self._lacks[copy] = []

    # Agents

    def message(self, since: int, spare: Array | None) -> Message:
        """Return a new message to nodes that have the changes before a place."""
        if self.whole:
            return Message(since, spare, self.sent)
        return RowMessage(self, since)

    def room(self, nbytes: int, flat: Array) -> Array:
        """Return the memory in which a message for a vector is received."""
        if self.whole and self.sent == self.dtype:
            return flat.view(np.uint8)
        return np.empty(nbytes, np.uint8)

    def unpack(
        self, message: Array, flat: Array, copies: DoubleBuffer
    ) -> Iterator[bool]:
        """Bring the copy that is written up to date with a message."""
        if self.whole:
            if self.sent != self.dtype:
                yield from copying(message.view(self.sent), flat)
            return
        copy = copies.writing
        flat, older = copies.copy(copy), copies.copy(1 - copy)
        parts: list[Part] = pickle.loads(message.data)
        found = dict(zip(self.names, parts, strict=True))
        changed = {name: found[name][0] for name in self.tables}
        rows = {name: each for name, each in changed.items() if each is not None}
        if len(rows) < len(changed):
            self._lacks = [None, None]
            self._log.append(np.arange(self._number_of_rows))
        else:
            # The rows that this copy lacks and the older one has.
            source = self.views(older)
            tables = {name: source[name] for name in self.tables}
            self._copy_lacked(tables, flat, copy)
            self.note(rows)
        for name, view in self.views(flat).items():
            places, values = found[name]
            view[... if places is None else places] = values
        self._complete(flat, copy)
        if copies.version() < 0:
            # Nobody reads the other one yet. Otherwise the next message would copy
            # whole tables.
            older[...] = flat
            self._lacks[1 - copy] = []

    # Every rank

    def read(
        self, flat: Array, into: Mapping[str, Array], since: Mapping[str, int]
    ) -> dict[str, int]:
        """Copy parameters from a published vector to arrays.

        Returns which changes the array of each sparse variable has, for the next call.
        """
        views = self.views(flat)
        if self.whole:
            for name, array in into.items():
                copy_quietly(array, views[name])
            return {}
        end = self.end(flat)
        # Mostly one place: that of the last copy, of all variables.
        rows = {place: self.changes(place, end) for place in set(since.values())}
        for name, array in into.items():
            found = self.rows_of(name, rows.get(since.get(name, NOTHING)))
            copy_rows(views[name], array, found)
        return {name: end for name in into if name in self.tables}

    def changes(self, begin: int, end: int) -> Array | None:
        """Return the rows between two places of the log, sorted; None for all."""
        if begin == NOTHING:
            return None
        entries = self._log.between(begin, end)
        return None if entries is None else _united([entries])

    def end(self, flat: Array) -> int:
        """Return the place in the log up to which a vector has all changes."""
        end = int(self._end(flat)[0])
        self._log.sync()
        return end

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the place of each variable in a vector."""
        return self._wire.parameters.views(flat)

    def _end(self, flat: Array) -> Array:
        """Return what a published vector ends with, shape (1,)."""
        return flat[self._wire.parameters.size :].view(np.int64)[:1]

    def rows_of(self, name: str, rows: Array | None) -> Array | None:
        """Return a variable's part of sorted rows, numbered within it; None for all."""
        if rows is None or name not in self.tables:
            return None
        table = self.tables[name]
        begin, end = np.searchsorted(rows, [table.start, table.stop])
        return rows[begin:end] - table.start

    def free(self) -> None:
        """Free the memory. Collective."""
        if not self.whole:
            self._log.free()


class RowMessage(Message):
    """The rows that have changed.

    There may be many more of these than rows of an update, and to copy them may take
    longer than some updates. So a try that an update has overtaken is not repeated as a
    whole: the next one copies only the rows that have changed since.
    """

    def __init__(self, copier: Copier, since: int) -> None:
        super().__init__(since)
        self._copier, self.place = copier, since
        # By variable, in the order in which they were copied.
        self._parts: dict[str, list[Part]] = {name: [] for name in copier.names}

    def reading(self, flat: Array) -> Iterator[bool]:
        """Copy the rows that have changed since the last try; see `Message.reading`.

        An update that overwrites the vector meanwhile changes rows that are in the log
        after the place that the vector ends with. So the next try copies them again.
        """
        end = self._copier.end(flat)
        rows = self._copier.changes(self.place, end)
        for name, view in self._copier.views(flat).items():
            places = self._copier.rows_of(name, rows)
            if places is None:
                values = np.empty_like(view)
                yield from copying(view.reshape(-1), values.reshape(-1))
                self._parts[name] = [(None, values)]
            else:
                values = np.empty((places.size, *view.shape[1:]), view.dtype)
                for chunk in _chunks(values):
                    values[chunk] = view[places[chunk]]
                    yield True
                self._parts[name].append((places, values))
        self.place = end

    def complete(self, version: int) -> None:
        """Put together the bytes: pickled, rows and values of each variable."""
        super().complete(version)
        parts = [_latest(parts) for parts in self._parts.values()]
        self.data = np.frombuffer(pickle.dumps(parts, -1), np.uint8)
        self._parts.clear()


def _united(parts: Sequence[Array]) -> Array:
    """Return different rows, sorted."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))


def copy_rows(source: Array, target: Array, rows: Array | None) -> None:
    """Copy some rows of an array to another one of its shape; None for all of it."""
    if rows is None:
        copy_quietly(target, source)
        return
    step = max(1, _CHUNK // max(1, math.prod(source.shape[1:])))
    for start in range(0, rows.size, step):
        places = rows[start : start + step]
        target[places] = source[places]


def copying(source: Array, target: Array) -> Iterator[bool]:
    """Copy a vector in short steps."""
    for chunk in _chunks(source):
        copy_quietly(target[chunk], source[chunk])
        yield True


def _chunks(rows: Array) -> Iterator[slice]:
    """Return ranges of rows, each of which is copied in a short step."""
    step = max(1, _STEP * len(rows) // max(1, rows.nbytes))
    return (slice(at, at + step) for at in range(0, len(rows), step))


def _latest(parts: list[Part]) -> Part:
    """Return all rows of a variable, each with the values that were copied last."""
    (rows, values), *later = parts
    if not later:
        return rows, values
    if rows is None:
        for newer, found in later:
            values[newer] = found
        return None, values
    every = np.concatenate([rows, *(newer for newer, _ in later)])
    united, last = np.unique(every[::-1], return_index=True)
    return united, np.concatenate([found for _, found in parts])[every.size - 1 - last]

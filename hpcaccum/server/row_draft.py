"""A message with the rows that another node lacks, made while updates go on.

These may be many more rows than those of an update, and take longer to copy than some
updates to make. So a try that an update has overtaken is not repeated as a whole: the
next one copies only the rows that have changed since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.server.messages import Draft

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum.dtypes import Array
    from hpcaccum.server.parameter_copies import SparseCopier

    # Rows of a variable, None for all, and their values.
    Part = tuple["Array | None", "Array"]

# A message begins with the number of rows, then has their numbers; or with this if it
# has all values. The values of all variables follow.
_ALL = -1
_WORD = np.dtype(np.int64).itemsize


class RowDraft(Draft):
    """A message that is being made, of the rows that have changed.

    Args:
        copier: Knows them.
        since: `place` of the last message to that node.
    """

    def __init__(self, copier: SparseCopier, since: int) -> None:
        self._copier, self.place = copier, since
        # Of each variable, in the order in which they were copied.
        self._parts: dict[str, list[Part]] = {name: [] for name in copier.names}

    def read(self, flat: Array) -> None:
        """Copy the rows that have changed since the last try; see `Draft.read`.

        An update that overwrites the vector meanwhile changes rows that are in the log
        after the place that the vector ends with. So the next try copies them again.
        """
        end = self._copier.end(flat)
        rows = self._copier.changes(self.place, end)
        for name, view in self._copier.views(flat).items():
            places = self._copier.rows_of(name, rows)
            if places is None:
                self._parts[name] = [(None, view.copy())]
            else:
                self._parts[name].append((places, view[places]))
        self.place = end

    def message(self) -> Array:
        """Return the message, a vector of bytes."""
        parts = {name: _united(parts) for name, parts in self._parts.items()}
        values = [found.reshape(-1) for _, found in parts.values()]
        pieces = [self._numbers(parts), *values]
        return np.concatenate([piece.view(np.uint8) for piece in pieces])

    def _numbers(self, parts: Mapping[str, Part]) -> Array:
        """Return what a message begins with."""
        numbers = []
        for name, table in self._copier.tables.items():
            rows, _ = parts[name]
            if rows is None:
                return np.array([_ALL])
            numbers.append(rows + table.start)
        size = sum(each.size for each in numbers)
        return np.concatenate([np.array([size]), *numbers])


def _united(parts: list[Part]) -> Part:
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


def divided(message: Array) -> tuple[Array | None, Array]:
    """Return the rows of a message, None for all, and the bytes of the values."""
    number = int(message[:_WORD].view(np.int64)[0])
    if number == _ALL:
        return None, message[_WORD:]
    end = _WORD * (1 + number)
    return message[_WORD:end].view(np.int64).copy(), message[end:]

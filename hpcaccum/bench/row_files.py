"""The files of rows: JSON lines and CSV. JSON lines are also read."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.measure import Row
from hpcaccum.files import (
    JsonLines,
    ending_the_job,
    json_value,
    open_output,
    read_lines,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Key = tuple[str, str, int, int, str]
    Rows = dict[Key, "Measured"]

_FIELDS = dataclasses.fields(Row)
# Files of earlier versions do not have the fields with a default.
_REQUIRED = {each.name for each in _FIELDS if each.default is dataclasses.MISSING}


class RowFiles:
    """The files of one run. Each row is written when it is measured.

    Args:
        lines: Gets a JSON line for each row; None writes none.
        table: Gets the same fields as CSV. Lists and mappings are JSON in a cell.

    Raises:
        InvalidArgumentError: If a file cannot be opened, or the disk is full.
    """

    def __init__(self, lines: Path | None, table: Path | None) -> None:
        self._lines, self._path = JsonLines("--json", lines), table
        self._table = open_output("--csv", table)
        self._writer: csv.DictWriter[str] | None = None

    def write(self, row: Row, facts: Mapping[str, Any]) -> None:
        """Write a row and its circumstances, whose names are those of every row."""
        fields = {**facts, **dataclasses.asdict(row)}
        self._lines.write(fields)
        if self._table:
            with ending_the_job("--csv", self._path):
                self._write_table(fields)
                self._table.flush()

    def _write_table(self, fields: Mapping[str, Any]) -> None:
        if self._writer is None:
            assert self._table is not None
            self._writer = csv.DictWriter(self._table, [*fields], lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow({name: _cell(value) for name, value in fields.items()})

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._table:
            self._table.close()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


class Measured(NamedTuple):
    """A row of a file, and its circumstances."""

    row: Row
    facts: Mapping[str, Any]


def read(path: Path) -> Rows:
    """Return the rows of a file that ``--json`` wrote; of equal ones the last."""
    rows: Rows = {}
    for number, line in enumerate(read_lines(path), 1):
        try:
            key, found = _parse(line)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise InvalidArgumentError(
                f"{path}: line {number} is not what hpcaccum bench --json writes"
            ) from None
        rows[key] = found
    if not rows:
        raise InvalidArgumentError(f"{path}: empty")
    return rows


def _parse(line: str) -> tuple[Key, Measured]:
    """Return a row and what it is known by; any error means that it is not one."""
    facts = json_value(line)
    given = [e.name for e in _FIELDS if e.name in _REQUIRED or e.name in facts]
    row = Row(**{name: facts[name] for name in given})
    times = row.median_us, (row.spread_us or 0) + row.median_us
    if not all(map(math.isfinite, times)) or not 0 < times[0] <= times[1]:
        raise ValueError(line)
    names = row.benchmark, row.name, facts["mpi"], row.raw or ""
    for name in names:
        printable(name)
    nbytes, ranks, _ = map(counting, (row.bytes, facts["ranks"], facts["nodes"]))
    return (row.benchmark, row.name, nbytes, ranks, facts["mpi"]), Measured(row, facts)


def counting(number: Any) -> int:
    """Return what must be an integer of at least 1, or raise a ValueError."""
    if not isinstance(number, int) or not 1 <= number < 1 << 63:
        raise ValueError(number)
    return number


def printable(name: Any) -> str:
    """Return what must be a text that a file can hold, or raise an error."""
    if not isinstance(name, str):
        raise TypeError(name)
    # JSON may have halves of surrogate pairs.
    name.encode()
    return name

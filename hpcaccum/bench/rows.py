"""The rows of one size: their figures, and their files. JSON lines are also read."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccum import InvalidArgumentError
from hpcaccum.files import (
    JsonLines,
    ending_the_job,
    json_value,
    open_output,
    read_lines,
)

Key = tuple[str, int, int, str, str]
# Rows, and the circumstances of each.
Rows = dict[Key, tuple["Row", Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind at one size: a line of the table, and of the JSON file.

    Times are those of one operation, over all ranks and repeats, in microseconds.
    `floor_us` is the time to move the bytes at the rate of a copy by all ranks or,
    between nodes, of a plain exchange; `vs_floor` is the median over it. `vs_mpi` is
    the time of `raw` over this one. `spread_us` is the distance of the quartiles.
    """

    benchmark: str
    name: str
    bytes: int
    raw: str | None
    reference: bool
    samples: int
    min_us: float
    median_us: float
    p99_us: float | None
    max_us: float
    algbw: float | None
    busbw: float | None
    floor_us: float | None
    vs_mpi: float | None
    vs_floor: float | None
    figures: dict[str, float]
    spread_us: float


class RowFiles:
    """The files of ``--json`` and ``--csv``. Rows are written at once."""

    def __init__(self, lines: Path | None, table: Path | None) -> None:
        self._lines, self._path = JsonLines("--json", lines), table
        self._table = open_output("--csv", table)
        self._cells: csv.DictWriter[str] | None = None

    def write(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
        """Write rows, each with its circumstances, which always have the same names."""
        for row in rows:
            fields = {**facts, **dataclasses.asdict(row)}
            self._lines.write(fields)
            if self._table is None:
                continue
            with ending_the_job("--csv", self._path):
                if self._cells is None:
                    self._cells = csv.DictWriter(
                        self._table, fields, lineterminator="\n"
                    )
                    self._cells.writeheader()
                # Lists and mappings are JSON in a cell.
                for name, value in fields.items():
                    if isinstance(value, (dict, list)):
                        fields[name] = json.dumps(value)
                self._cells.writerow(fields)
                self._table.flush()

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._table:
            self._table.close()


def read(path: Path) -> Rows:
    """Return the rows of a file that ``--json`` wrote; of equal ones the last."""
    found: Rows = {}
    names = [each.name for each in dataclasses.fields(Row)]
    for number, line in enumerate(read_lines(path), 1):
        with reading(path, number, "bench --json"):
            facts = json_value(line)
            row = Row(**{name: facts[name] for name in names})
            if not row.median_us > 0:
                raise ValueError(line)
            job = facts["ranks"], facts["mpi"]
            key = (row.benchmark, row.bytes, *job, row.name)
            found[key] = row, facts
    if not found:
        raise InvalidArgumentError(f"{path}: empty")
    return found


@contextlib.contextmanager
def reading(path: Path, number: int, writer: str) -> Iterator[None]:
    """Name the line if the block finds that it is not what a command writes."""
    try:
        yield
    except (ValueError, TypeError, LookupError):
        raise InvalidArgumentError(
            f"{path}: line {number} is not what hpcaccum {writer} writes"
        ) from None

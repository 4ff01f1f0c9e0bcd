"""The rows of one size: their figures, and their files. JSON lines are also read."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum import InvalidArgumentError
from hpcaccum.files import (
    JsonLines,
    ending_the_job,
    json_value,
    open_output,
    read_lines,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hpcaccum.bench.measure import Case

    Key = tuple[str, str, int, int, str]
    Rows = dict[Key, "Measured"]

# Samples from which the 99th percentile is not simply the maximum.
_P99_SAMPLES = 100


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind at one size: a line of the table, and of the JSON file.

    Attributes:
        benchmark, name, bytes: What was measured.
        raw: What ``vs_mpi`` compares with.
        reference: Whether this is not hpcaccum, but what it is compared with.
        samples: Over all ranks.
        min_us, median_us, max_us: Of one operation, over ranks and repeats.
        p99_us: The 99th percentile; None of fewer than 100 samples.
        algbw, busbw: In GB/s: bytes over the median; that times nccl-tests' factor.
        floor_us: Time to move the bytes at the rate of a copy by all ranks or, between
            nodes, at that of a plain exchange.
        vs_mpi: Time of the raw call over this time; above 1 is faster.
        vs_floor: This time over the floor; 1 is optimal.
        figures: More numbers, by name.
        spread_us: The upper quartile of the times minus the lower one; None if unknown.
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
    # Files of earlier versions do not have it.
    spread_us: float | None = None


def rows(benchmark: str, case: Case, samples: Mapping[str, list[float]]) -> list[Row]:
    """Return the rows of one size, from the seconds of each kind."""
    nbytes = case.nbytes
    medians = {name: float(np.median(each)) for name, each in samples.items()}
    made = []
    for kind in case.kinds:
        microseconds = 1e6 * np.array(samples[kind.name])
        percentiles = np.percentile(microseconds, [0, 25, 50, 75, 99, 100])
        low, lower, middle, upper, p99, high = map(float, percentiles)
        median = medians[kind.name]
        which, factor = kind.floor or (kind.name, 0)
        floor = factor * medians[which]
        bandwidth = nbytes / max(median, 1e-9) / 1e9
        row = Row(
            benchmark=benchmark,
            name=kind.name,
            bytes=nbytes,
            raw=kind.raw,
            reference=kind.reference,
            samples=len(microseconds),
            min_us=low,
            median_us=middle,
            p99_us=p99 if len(microseconds) >= _P99_SAMPLES else None,
            max_us=high,
            algbw=bandwidth if kind.bus else None,
            busbw=bandwidth * kind.bus or None,
            floor_us=1e6 * floor or None,
            vs_mpi=medians[kind.raw] / median if kind.raw else None,
            vs_floor=median / floor if floor else None,
            figures=kind.figures(medians),
            spread_us=upper - lower,
        )
        made.append(row)
    return made


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
        self._writer: Any = None

    def write(self, row: Row, facts: Mapping[str, Any]) -> None:
        """Write a row and its circumstances, whose names are those of every row."""
        fields = {**facts, **dataclasses.asdict(row)}
        self._lines.write(fields)
        if self._table is None:
            return
        with ending_the_job("--csv", self._path):
            if self._writer is None:
                self._writer = csv.DictWriter(
                    self._table, [*fields], lineterminator="\n"
                )
                self._writer.writeheader()
            self._writer.writerow({name: _cell(each) for name, each in fields.items()})
            self._table.flush()

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
    found: Rows = {}
    for number, line in enumerate(read_lines(path), 1):
        with reading(path, number, "bench --json"):
            facts = json_value(line)
            names = [each.name for each in dataclasses.fields(Row)]
            row = Row(**{name: facts[name] for name in names if name in facts})
            if not row.median_us > 0:
                raise ValueError(line)
            key = row.benchmark, row.name, row.bytes, facts["ranks"], facts["mpi"]
            found[key] = Measured(row, facts)
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

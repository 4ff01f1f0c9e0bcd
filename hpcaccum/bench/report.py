"""The tables: plain lines of at most 80 columns, printed row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpcaccum.bench.rows import Row
from hpcaccum.tables import table


class Column(NamedTuple):
    """A column of a table: its title, width, and the value for a row."""

    title: str
    width: int
    value: Callable[[Row], float | None]


def figure(title: str, width: int, name: str) -> Column:
    """Return the column of one of the figures of a row."""
    return Column(title, width, lambda row: row.figures.get(name))


class Columns(NamedTuple):
    """The columns of a table: `times`, then `last`.

    `legend` explains them, in three lines; `above` is a line that divides the last ones
    into groups.
    """

    legend: str
    last: tuple[Column, ...]
    above: str = ""
    times: tuple[str, ...] = ("min", "median", "p99", "max")


USUAL = Columns(
    "one operation, over all ranks and repeats; n: samples; p99: from 100 samples on\n"
    "algbw, busbw: GB/s as in nccl-tests; vs MPI: times faster than MPI's own call\n"
    "floor: times slower than memory, or a link between nodes, allows; of the median",
    (
        Column("algbw", 5, lambda row: row.algbw),
        Column("busbw", 5, lambda row: row.busbw),
        Column("vs MPI", 6, lambda row: row.vs_mpi),
        Column("floor", 5, lambda row: row.vs_floor),
    ),
)

# No minimum is longer than 999 of the unit of its median.
_WIDTHS = {"min": 4, "median": 6, "p99": 5, "max": 5}


def size_text(nbytes: int) -> str:
    """Return bytes in a suitable unit, such as ``4 KiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def time_text(microseconds: float) -> str:
    """Return a time in a suitable unit, such as ``1.23 ms``."""
    scale, unit = _unit(microseconds)
    return f"{number_text(microseconds / scale)} {unit}"


def _unit(microseconds: float) -> tuple[float, str]:
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= 0.9995 * scale:
            return scale, unit
    return 1.0, "us"


def number_text(number: float | None) -> str:
    """Return a number with three digits, an integer if it is large; ``-`` for None."""
    if number is None:
        return "-"
    if number < 9.995:
        return f"{number:.2f}"
    if number < 99.95:
        return f"{number:.1f}"
    return f"{number:.0f}" if number < 1e5 else f"{number:.0e}"


def head(benchmark: str, columns: Columns = USUAL) -> str:
    """Return the lines above the rows of a benchmark."""
    last = [column.title for column in columns.last]
    titles = _line(["size", "", "n", *columns.times, "", *last], columns)
    before = len(titles) - sum(1 + column.width for column in columns.last)
    above = f"{benchmark:{before + 1}}{columns.above}".rstrip()
    return f"\n{above}\n{titles}"


def lines(rows: Sequence[Row], columns: Columns = USUAL) -> Iterator[str]:
    """Yield the lines of one size."""
    for number, row in enumerate(rows):
        size = "" if number else size_text(row.bytes)
        scale, unit = _unit(row.median_us)
        count = str(row.samples) if row.samples < 1e5 else f"{row.samples:.0e}"
        times = [getattr(row, f"{name}_us") for name in columns.times]
        scaled = [None if time is None else time / scale for time in times]
        last = [column.value(row) for column in columns.last]
        cells = [*map(number_text, scaled), unit, *map(number_text, last)]
        yield _line([size, row.name, count, *cells], columns)


def _line(cells: Sequence[str], columns: Columns) -> str:
    times = [f">{_WIDTHS[name]}" for name in columns.times]
    forms = [">7", "13", ">5", *times, "2", *(f">{c.width}" for c in columns.last)]
    return " ".join(map(format, cells, forms))


def print_groups(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    groups: Sequence[str],
    left: Sequence[int] = (0,),
) -> None:
    """Print a table of cells, with the name of each group above its rows."""
    heads, rule, *shown = table(titles, rows, left)
    print(heads, rule, sep="\n")
    for group, line, above in zip(groups, shown, ["", *groups], strict=False):
        print(*([] if group == above else [group]), line, sep="\n")

"""The tables: plain lines of at most 80 columns, printed row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpcaccum.bench.measure import Row


class Column(NamedTuple):
    """A column of a table: its title, width, and the value for a row.

    Attributes:
        figure: The name of the figure that is the value; "" if it is none.
    """

    title: str
    width: int
    value: Callable[[Row], float | None]
    figure: str = ""


def figure(title: str, width: int, name: str) -> Column:
    """Return the column of one of the figures of a row."""
    return Column(title, width, lambda row: row.figures.get(name), name)


class Columns(NamedTuple):
    """The columns of a table, after the size, the name and the number of samples.

    Attributes:
        legend: Explains them, in three lines.
        last: The columns after the times.
        above: A line above the last ones, which divides them into groups.
        times: Which times are shown.
    """

    legend: str
    last: tuple[Column, ...]
    above: str = ""
    times: tuple[str, ...] = ("min", "median", "p99", "max")

    @property
    def figures(self) -> set[str]:
        """Names of figures that are in columns."""
        return {column.figure for column in self.last} - {""}


def _host(limit: str) -> Columns:
    return Columns(
        "one operation, over all ranks and repeats; n: samples; p99: from 100 samples "
        "on\nalgbw, busbw: GB/s as in nccl-tests; vs MPI: times faster than MPI's own "
        f"call\nfloor: times slower than {limit} allows; these four are of the median",
        (
            Column("algbw", 5, lambda row: row.algbw),
            Column("busbw", 5, lambda row: row.busbw),
            Column("vs MPI", 6, lambda row: row.vs_mpi),
            Column("floor", 5, lambda row: row.vs_floor),
        ),
    )


HOST = _host("memory")
# The floor of a copy is still that of memory, and 1.
BETWEEN_NODES = _host("a link")
DEVICE = Columns(
    "one operation; n: samples; p99: from 100 samples on\n"
    "GB/s: the size over the median; moved: the same of all bytes that must move\n"
    "vsCuPy: times faster than plain CuPy; copy: fraction of the rate of a plain copy",
    (
        Column("GB/s", 5, lambda row: row.algbw),
        Column("moved", 5, lambda row: row.busbw),
        Column("vsCuPy", 6, lambda row: row.vs_mpi),
        Column("copy", 5, lambda row: 1 / row.vs_floor if row.vs_floor else None),
    ),
)

# No minimum is longer than 999 of the unit of its median.
_WIDTHS = {"min": 4, "median": 6, "p99": 5, "max": 5}
_UNITS = ((1.0, "us"), (1e3, "ms"), (1e6, "s"))


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
    fitting = [pair for pair in _UNITS if microseconds >= pair[0] * 0.9995]
    return fitting[-1] if fitting else _UNITS[0]


def number_text(number: float | None) -> str:
    """Return a number with three digits, an integer if it is large; ``-`` for None."""
    if number is None:
        return "-"
    if number < 9.995:
        return f"{number:.2f}"
    if number < 99.95:
        return f"{number:.1f}"
    return f"{number:.0f}" if number < 1e5 else f"{number:.0e}"


def head(benchmark: str, columns: Columns = HOST) -> str:
    """Return the lines above the rows of a benchmark."""
    times = " ".join(f"{each:>{_WIDTHS[each]}}" for each in columns.times)
    last = " ".join(f"{column.title:>{column.width}}" for column in columns.last)
    titles = f"{'size':>7} {'':13} {'n':>5} {times} {'':2} "
    above = f"{benchmark:{len(titles)}}{columns.above}".rstrip()
    return f"\n{above}\n{titles}{last}"


def lines(rows: Sequence[Row], columns: Columns = HOST) -> Iterator[str]:
    """Yield the lines of one size, then its other figures."""
    for number, row in enumerate(rows):
        size = size_text(row.bytes) if number == 0 else ""
        yield _line(row, size, columns)
    for row in rows:
        for what, figure in row.figures.items():
            if what not in columns.figures:
                yield f"{'':7} {row.name}: {number_text(figure)} {what}"


def _line(row: Row, size: str, columns: Columns) -> str:
    scale, unit = _unit(row.median_us)
    shown = [f"{_count_text(row.samples):>5}"]
    for name in columns.times:
        time = getattr(row, f"{name}_us")
        text = number_text(None if time is None else time / scale)
        shown.append(f"{text:>{_WIDTHS[name]}}")
    shown.append(f"{unit:2}")
    shown += [f"{number_text(c.value(row)):>{c.width}}" for c in columns.last]
    return f"{size:>7} {row.name:13} {' '.join(shown)}"


def _count_text(count: int) -> str:
    return str(count) if count < 1e5 else f"{count:.0e}"

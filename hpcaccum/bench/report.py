"""The tables: plain lines of at most 80 columns, printed row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpcaccum.bench.measure import Row


class Columns(NamedTuple):
    """The last columns of a table.

    Attributes:
        legend: Explains them, in two lines.
        titles: Of bandwidth, bus bandwidth, the ratio to another kind, the last column.
        last: Returns the value of the last column.
    """

    legend: str
    titles: tuple[str, str, str, str]
    last: Callable[[Row], float | None]


HOST = Columns(
    "one operation, over all ranks and repeats; GB/s of the median, as in nccl-tests\n"
    "vs MPI: times faster than MPI's own call; floor: times slower than memory allows",
    ("algbw", "busbw", "vs MPI", "floor"),
    lambda row: row.vs_floor,
)
DEVICE = Columns(
    "one operation; GB/s of the median, and of all bytes that must move\n"
    "vsCuPy: times faster than plain CuPy; copy: fraction of the rate of a plain copy",
    ("GB/s", "moved", "vsCuPy", "copy"),
    lambda row: 1 / row.vs_floor if row.vs_floor else None,
)

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
    bandwidth, bus, ratio, last = columns.titles
    return (
        f"\n{benchmark}\n"
        f"{'size':>7} {'':13} {'min':>6} {'median':>6} {'p99':>6} {'max':>6} "
        f"{'':2} {bandwidth:>5} {bus:>5} {ratio:>6} {last:>5}"
    )


def lines(rows: Sequence[Row], columns: Columns = HOST) -> Iterator[str]:
    """Yield the lines of one size, then its other figures."""
    for number, row in enumerate(rows):
        size = size_text(row.bytes) if number == 0 else ""
        yield _line(row, size, columns.last(row))
    for row in rows:
        for what, figure in row.figures.items():
            yield f"{'':7} {row.name}: {number_text(figure)} {what}"


def _line(row: Row, size: str, last: float | None) -> str:
    scale, unit = _unit(row.median_us)
    times = (row.min_us, row.median_us, row.p99_us, row.max_us)
    shown = " ".join(f"{number_text(each / scale):>6}" for each in times)
    return (
        f"{size:>7} {row.name:13} {shown} {unit:2} {number_text(row.algbw):>5} "
        f"{number_text(row.busbw):>5} {number_text(row.vs_mpi):>6} "
        f"{number_text(last):>5}"
    )

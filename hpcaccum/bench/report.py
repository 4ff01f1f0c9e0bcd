"""The tables: plain lines of at most 80 columns, written as soon as a row is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.bench.measure import Row

LEGEND = """\
one operation, over all ranks and repeats; GB/s of the median, as in nccl-tests
vs MPI: times faster than MPI's own call; floor: times slower than memory allows"""

_HEAD = (
    f"{'size':>7} {'':13} {'min':>6} {'median':>6} {'p99':>6} {'max':>6} "
    f"{'':2} {'algbw':>5} {'busbw':>5} {'vs MPI':>6} {'floor':>5}"
)

_UNITS = ((1.0, "us"), (1e3, "ms"), (1e6, "s"))


def size_text(nbytes: int) -> str:
    """Return bytes in the unit that people use, such as ``4 KiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def time_text(microseconds: float) -> str:
    """Return a time in the unit that people use, such as ``1.23 ms``."""
    scale, unit = _unit(microseconds)
    return f"{number_text(microseconds / scale)} {unit}"


def _unit(microseconds: float) -> tuple[float, str]:
    fitting = [pair for pair in _UNITS if microseconds >= pair[0] * 0.9995]
    return fitting[-1] if fitting else _UNITS[0]


def number_text(number: float | None) -> str:
    """Return three digits of a number, an integer if it is large; ``-`` for None."""
    if number is None:
        return "-"
    if number < 9.995:
        return f"{number:.2f}"
    if number < 99.95:
        return f"{number:.1f}"
    return f"{number:.0f}" if number < 1e5 else f"{number:.0e}"


def head(benchmark: str) -> str:
    """Return the lines above the rows of a benchmark."""
    return f"\n{benchmark}\n{_HEAD}"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of one size, and what is to be said below them."""
    for number, row in enumerate(rows):
        yield _line(row, size_text(row.bytes) if number == 0 else "")
    for row in rows:
        for what, figure in row.figures.items():
            yield f"{'':7} {row.name}: {number_text(figure)} {what}"


def _line(row: Row, size: str) -> str:
    scale, unit = _unit(row.median_us)
    times = (row.min_us, row.median_us, row.p99_us, row.max_us)
    shown = " ".join(f"{number_text(each / scale):>6}" for each in times)
    return (
        f"{size:>7} {row.name:13} {shown} {unit:2} {number_text(row.algbw):>5} "
        f"{number_text(row.busbw):>5} {number_text(row.vs_mpi):>6} "
        f"{number_text(row.vs_floor):>5}"
    )

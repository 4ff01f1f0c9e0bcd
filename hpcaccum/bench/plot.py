"""The pictures: times over sizes, and lines over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcaccum.bench.measure import COPY
from hpcaccum.bench.report import size_text, time_text
from hpcaccum.bench.rows import Row
from hpcaccum.plots import COLORS, add_legend, group_by, make_figure, set_ticks

# One for each color.
_MARKERS = "osD^vPX*"
_RAW_COLOR, _COPY_COLOR, _FLOOR_COLOR = "0.15", "0.6", "0.88"
_POWERS = [10.0**power for power in range(-6, 9)]


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a panel for each benchmark: times, or the bus bandwidth of an allreduce."""
    panels = group_by(rows, lambda row: row.benchmark)
    figure, axes = make_figure(len(panels), title)
    for axis, (benchmark, found) in zip(axes, panels.items(), strict=False):
        others = [row for row in found if row.name != COPY]
        if benchmark == "allreduce" and any(row.busbw for row in others):
            _bandwidths(axis, others)
        else:
            _times(axis, found)
        _label_bytes(axis, found)
    figure.savefig(path)


def _times(axis: Any, rows: Sequence[Row]) -> None:
    add_lines(axis, [(row, row.bytes, row.median_us) for row in rows])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    floor = _floor(rows)
    _shade(axis, floor, [row.floor_us for row in floor], low, "floor of\n")
    axis.set_ylim(low, high)
    set_ticks(axis.yaxis, _POWERS, _time_tick)
    axis.set_title(f"{rows[0].benchmark}: median time")


def _bandwidths(axis: Any, rows: Sequence[Row]) -> None:
    add_lines(axis, [(row, row.bytes, row.busbw) for row in rows if row.busbw])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    floor = _floor(rows)
    limits = [(row.busbw or 0) * (row.vs_floor or 0) for row in floor]
    high = max([high, *(1.5 * limit for limit in limits)])
    _shade(axis, floor, limits, high, "beyond the\nfloor of ")
    axis.set_ylim(low, high)
    set_ticks(axis.yaxis, _POWERS, "{:g}".format)
    axis.set_title("allreduce: bus bandwidth, GB/s")


def _floor(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the first name that has a floor."""
    with_floor = [row for row in rows if row.vs_floor]
    return [row for row in with_floor if row.name == with_floor[0].name]


def _shade(axis: Any, rows: list[Row], y: list[Any], end: float, label: str) -> None:
    if rows:
        x, label = [row.bytes for row in rows], f"{label}{rows[0].name}"
        axis.fill_between(x, y, end, color=_FLOOR_COLOR, label=label, zorder=0)


def add_lines(axis: Any, points: Iterable[tuple[Any, int, float]]) -> None:
    """Draw a line for each name: hpcaccum, references, plain copies.

    A point has what was measured, with its ``name`` and ``reference``, and its place.
    """
    ours = itertools.cycle(zip(COLORS, _MARKERS, strict=True))
    others = itertools.cycle("sDv^")
    for name, found in group_by(points, lambda point: point[0].name).items():
        if name == COPY:
            color, marker, style = _COPY_COLOR, ".", ":"
        elif found[0][0].reference:
            color, marker, style = _RAW_COLOR, next(others), "--"
        else:
            color, marker, style = *next(ours), "-"
        axis.plot(
            [x for _, x, _ in found],
            [y for _, _, y in found],
            color=color,
            marker=marker,
            markersize=4.5,
            markerfacecolor="white" if style == "--" else color,
            linestyle=style,
            linewidth=1.4,
            label=name,
        )


def _time_tick(microseconds: float) -> str:
    """Return a time as ``10 us``, without the zeros of ``10.0 us``."""
    number, _, unit = time_text(microseconds).partition(" ")
    return f"{float(number):g} {unit}"


def _label_bytes(axis: Any, rows: Sequence[Row]) -> None:
    sizes = sorted({row.bytes for row in rows})
    # Every other label if all would overlap.
    shown = sizes[:: -(-len(sizes) // 6)]
    label_axis(axis, shown, [size_text(size) for size in shown])


def label_axis(axis: Any, ticks: Sequence[int], labels: Sequence[str]) -> None:
    """Label the horizontal axis, and name the lines."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels, fontsize=8)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)
    add_legend(axis)

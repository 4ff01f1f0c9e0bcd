"""The pictures: times over sizes, changes between two runs, efficiencies over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.bench.measure import COPY
from hpcaccum.bench.panels import (
    FLOOR_COLOR,
    add_legend,
    draw_line,
    group_by,
    label_sizes,
    looks_of,
    make_figure,
    set_ticks,
    time_tick,
)
from hpcaccum.bench.report import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hpcaccum.bench import scaling
    from hpcaccum.bench.compare import Change
    from hpcaccum.bench.measure import Row
    from hpcaccum.bench.panels import Curve

_PANELS = 6


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a panel for each benchmark."""
    panels = group_by(rows, lambda row: row.benchmark)
    figure, axes = make_figure(len(panels), title)
    for axis, (benchmark, found) in zip(axes, panels.items(), strict=False):
        if len({row.bytes for row in found}) == 1:
            _ranges(axis, found)
            axis.set_title(f"{benchmark}, {size_text(found[0].bytes)}")
        elif benchmark == "allreduce" and any(
            row.busbw for row in found if not row.reference
        ):
            _bandwidths(axis, found)
            axis.set_title("allreduce: bus bandwidth, GB/s")
        else:
            _times(axis, found)
            axis.set_title(f"{benchmark}: median time")
    figure.savefig(path, dpi=120)


def draw_changes(
    changes: Sequence[Change], tolerance: float, places: Sequence[str], path: Path
) -> None:
    """Draw the changes between two runs, a panel for each benchmark.

    Of hpcaccum, these are the ratios; of references, their own times.
    """
    panels = group_by(changes, lambda change: change.new.benchmark)
    title = (
        f"new time over old, relative to the reference; grey: at most {tolerance:.0%} "
        "slower or faster; circle: slower, beyond the noise\n"
        "dashed and dotted: the references' own times\n"
        f"old: {places[0]}; new: {places[1]}"
    )
    figure, axes = make_figure(len(panels), title)
    for axis, (benchmark, found) in zip(axes, panels.items(), strict=False):
        _changes(axis, found, tolerance)
        axis.axhspan(1 / (1 + tolerance), 1 + tolerance, color=FLOOR_COLOR, zorder=0)
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.5), max(high, 2))
        values = (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100)
        set_ticks(axis.yaxis, values, "{:g}".format)
        label_sizes(axis, [change.new for change in found])
        add_legend(axis)
        axis.set_title(f"{benchmark}: new over old")
    figure.savefig(path, dpi=120)


def _changes(axis: Any, changes: Sequence[Change], tolerance: float) -> None:
    looks = looks_of([change.new for change in changes])
    for name, found in group_by(changes, lambda change: change.new.name).items():
        curve = [(change.new.bytes, change.ratio) for change in found]
        draw_line(axis, name, curve, looks[name])
        judged = [each for each in found if each.verdict(tolerance) == "slower"]
        x = [change.new.bytes for change in judged]
        y = [change.ratio for change in judged]
        circle = {"markeredgecolor": looks[name].color, "markerfacecolor": "none"}
        axis.plot(x, y, "o", markersize=11, **circle)


def draw_efficiencies(
    curves: Sequence[scaling.Curve], places: Sequence[str], path: Path
) -> None:
    """Draw efficiency over ranks, a panel for each title."""
    panels = group_by(curves, lambda curve: curve.title)
    titles = [*panels][:: -(-len(panels) // _PANELS)]
    title = "\n".join(["efficiency: 1 is perfect", *dict.fromkeys(places)])
    figure, axes = make_figure(len(titles), title)
    for axis, title in zip(axes, titles, strict=False):
        _efficiencies(axis, panels[title])
        axis.set_title(title)
    figure.savefig(path, dpi=120)


def _efficiencies(axis: Any, curves: Sequence[scaling.Curve]) -> None:
    looks = looks_of(curves)
    for curve in curves:
        draw_line(axis, curve.name, curve.efficiencies(), looks[curve.name])
    ranks = sorted({size.ranks for curve in curves for size in curve.points})
    axis.axhline(1, color="0.5", linewidth=1)
    axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, map(str, ranks))
    axis.set_xticks([], minor=True)
    axis.set_xlabel("ranks")
    axis.grid(alpha=0.25)
    add_legend(axis)


def _curves(
    rows: Sequence[Row], value: Callable[[Row], float | None]
) -> Iterator[tuple[str, Curve]]:
    """Yield names and their values over sizes, if there are any."""
    for name, found in group_by(rows, lambda row: row.name).items():
        pairs = [(row.bytes, value(row)) for row in found]
        curve = [(x, y) for x, y in pairs if y is not None]
        if curve:
            yield name, curve


def _times(axis: Any, rows: Sequence[Row]) -> None:
    looks = looks_of(rows)
    for name, curve in _curves(rows, lambda row: row.median_us):
        draw_line(axis, name, curve, looks[name])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    first = next((row for row in rows if row.vs_floor), None)
    if first:
        floor = dict(_curves(rows, lambda row: row.floor_us))[first.name]
        x, y = zip(*floor, strict=True)
        label = f"floor of\n{first.name}"
        axis.fill_between(x, low, y, color=FLOOR_COLOR, label=label, zorder=0)
    axis.set_ylim(low, high)
    powers = [10.0**power for power in range(-3, 9)]
    set_ticks(axis.yaxis, powers, time_tick)
    label_sizes(axis, rows)
    add_legend(axis)


def _bandwidths(axis: Any, rows: Sequence[Row]) -> None:
    looks = looks_of(rows)
    for name, curve in _curves(rows, lambda row: row.busbw):
        if name != COPY:
            draw_line(axis, name, curve, looks[name])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    first = next((row for row in rows if row.vs_floor), None)
    if first:
        limits = dict(_curves(rows, _limit))[first.name]
        x, y = zip(*limits, strict=True)
        high = max(high, 1.5 * max(y))
        label = f"beyond the\nfloor of {first.name}"
        axis.fill_between(x, y, high, color=FLOOR_COLOR, label=label, zorder=0)
    axis.set_ylim(low, high)
    set_ticks(axis.yaxis, [10.0**power for power in range(-6, 7)], "{:g}".format)
    label_sizes(axis, rows)
    add_legend(axis)


def _limit(row: Row) -> float | None:
    """Return the bus bandwidth at the floor."""
    if row.busbw is None or row.vs_floor is None:
        return None
    return row.busbw * row.vs_floor


def _ranges(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the median and the range of the times, for a single size.

    It ends at the 99th percentile, or at the maximum if one row has too few samples.
    """
    looks = looks_of(rows)
    ends = [row.p99_us for row in rows if row.p99_us is not None]
    last = "99th percentile"
    if len(ends) < len(rows):
        ends, last = [row.max_us for row in rows], "maximum"
    ends.reverse()
    for place, row in enumerate(reversed(rows)):
        color = looks[row.name].color
        axis.plot([row.min_us, ends[place]], [place, place], color=color, linewidth=3)
        axis.plot(row.median_us, place, "o", color=color, markersize=8)
        axis.annotate(
            time_text(row.median_us),
            (row.median_us, place),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xscale("log")
    axis.set_ylim(-0.6, len(rows) - 0.3)
    axis.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    powers = [10.0**power for power in range(-3, 9)]
    set_ticks(axis.xaxis, powers, time_tick)
    axis.set_xlabel(f"minimum, median, {last}")
    axis.grid(alpha=0.25, axis="x")

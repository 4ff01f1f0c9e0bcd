"""The pictures: times over sizes, changes between two runs, efficiencies over ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.bench.measure import COPY
from hpcaccum.bench.report import size_text, time_text
from hpcaccum.plots import (
    COLORS,
    add_legend,
    group_by,
    make_figure,
    save_figure,
    set_ticks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from hpcaccum.bench import scaling
    from hpcaccum.bench.compare import Change
    from hpcaccum.bench.measure import Row

    Curve = Sequence[tuple[int, float]]

# One for each color.
_MARKERS = "osD^vPX*"
_RAW_COLOR, _COPY_COLOR, _FLOOR_COLOR = "0.15", "0.6", "0.88"
_COPIES = (COPY, "copy shared")
_PANELS = 6


class _Look(NamedTuple):
    """How one row is drawn at all sizes."""

    color: str
    marker: str
    style: str


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
    save_figure(figure, path)


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
        axis.axhspan(1 / (1 + tolerance), 1 + tolerance, color=_FLOOR_COLOR, zorder=0)
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.5), max(high, 2))
        values = (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100)
        set_ticks(axis.yaxis, values, "{:g}".format)
        _label_sizes(axis, [change.new for change in found])
        add_legend(axis)
        axis.set_title(f"{benchmark}: new over old")
    save_figure(figure, path)


def _changes(axis: Any, changes: Sequence[Change], tolerance: float) -> None:
    looks = _looks([change.new for change in changes])
    for name, found in group_by(changes, lambda change: change.new.name).items():
        curve = [(change.new.bytes, change.ratio) for change in found]
        _line(axis, name, curve, looks[name])
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
    save_figure(figure, path)


def _efficiencies(axis: Any, curves: Sequence[scaling.Curve]) -> None:
    looks = _looks(curves)
    for curve in curves:
        _line(axis, curve.name, curve.efficiencies(), looks[curve.name])
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
    looks = _looks(rows)
    for name, curve in _curves(rows, lambda row: row.median_us):
        _line(axis, name, curve, looks[name])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    first = next((row for row in rows if row.vs_floor), None)
    if first:
        floor = dict(_curves(rows, lambda row: row.floor_us))[first.name]
        x, y = zip(*floor, strict=True)
        label = f"floor of\n{first.name}"
        axis.fill_between(x, low, y, color=_FLOOR_COLOR, label=label, zorder=0)
    axis.set_ylim(low, high)
    powers = [10.0**power for power in range(-3, 9)]
    set_ticks(axis.yaxis, powers, _time_tick)
    _label_sizes(axis, rows)
    add_legend(axis)


def _bandwidths(axis: Any, rows: Sequence[Row]) -> None:
    looks = _looks(rows)
    for name, curve in _curves(rows, lambda row: row.busbw):
        if name != COPY:
            _line(axis, name, curve, looks[name])
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    first = next((row for row in rows if row.vs_floor), None)
    if first:
        limits = dict(_curves(rows, _limit))[first.name]
        x, y = zip(*limits, strict=True)
        high = max(high, 1.5 * max(y))
        label = f"beyond the\nfloor of {first.name}"
        axis.fill_between(x, y, high, color=_FLOOR_COLOR, label=label, zorder=0)
    axis.set_ylim(low, high)
    set_ticks(axis.yaxis, [10.0**power for power in range(-6, 7)], "{:g}".format)
    _label_sizes(axis, rows)
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
    looks = _looks(rows)
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
    set_ticks(axis.xaxis, powers, _time_tick)
    axis.set_xlabel(f"minimum, median, {last}")
    axis.grid(alpha=0.25, axis="x")


def _looks(rows: Iterable[Row | scaling.Curve]) -> dict[str, _Look]:
    """Return a look for each name: hpcaccum, references, plain copies."""
    looks: dict[str, _Look] = {}
    ours = itertools.cycle(zip(COLORS, _MARKERS, strict=True))
    others = itertools.cycle("sDv^")
    for row in rows:
        if row.name in looks:
            continue
        if row.name in _COPIES:
            looks[row.name] = _Look(_COPY_COLOR, ".", ":")
        elif row.reference:
            looks[row.name] = _Look(_RAW_COLOR, next(others), "--")
        else:
            looks[row.name] = _Look(*next(ours), "-")
    return looks


def _line(axis: Any, name: str, curve: Curve, look: _Look) -> None:
    """Draw one row at all sizes."""
    color, marker, style = look
    x, y = zip(*curve, strict=True)
    axis.plot(
        x,
        y,
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


def _label_sizes(axis: Any, rows: Sequence[Row]) -> None:
    """Make the horizontal axis that of the sizes of some rows."""
    axis.set_xscale("log", base=2)
    sizes = sorted({row.bytes for row in rows})
    # Every other label if all would overlap.
    shown = sizes[:: -(-len(sizes) // 6)]
    axis.set_xticks(shown, [size_text(size) for size in shown], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)

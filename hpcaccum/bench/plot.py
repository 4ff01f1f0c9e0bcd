"""The pictures: times over sizes, and ratios between two runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.bench.report import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from hpcaccum.bench.measure import Row

    Curve = Sequence[tuple[int, float]]

# Okabe and Ito's colors, which most people can distinguish; markers for the others.
_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F5539",
    "#6A3D9A",
)
_MARKERS = "osD^vPX*"
_RAW_COLOR, _COPY_COLOR, _FLOOR_COLOR = "0.15", "0.6", "0.88"
_COPIES = ("copy", "copy shared")
_COLUMN, _ROW = 7.2, 4.2
_PANELS = 6


class _Look(NamedTuple):
    """How one row is drawn at all sizes."""

    color: str
    marker: str
    style: str


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw a panel for each benchmark.

    Args:
        rows: Of one run.
        title: A line or two.
        path: File to write; its suffix selects the format.
    """
    panels = _by(rows, lambda row: row.benchmark)
    figure, axes = _figure(len(panels), title)
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


def draw_ratios(
    ratios: Sequence[tuple[Row, float]], tolerance: float, title: str, path: Path
) -> None:
    """Draw the ratio of new to old times, a panel for each benchmark.

    Args:
        ratios: Rows, and their time over the old one.
        tolerance: Allowed slowdown, as a fraction.
        title: A line or two.
        path: File to write; its suffix selects the format.
    """
    panels = _by(ratios, lambda pair: pair[0].benchmark)
    figure, axes = _figure(len(panels), title)
    for axis, (benchmark, found) in zip(axes, panels.items(), strict=False):
        looks = _looks([row for row, _ in found])
        for name, pairs in _by(found, lambda pair: pair[0].name).items():
            _line(axis, name, [(r.bytes, ratio) for r, ratio in pairs], looks[name])
        axis.axhspan(1 / (1 + tolerance), 1 + tolerance, color=_FLOOR_COLOR, zorder=0)
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.5), max(high, 2))
        _ticks(axis.yaxis, (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100), "{:g}".format)
        _size_axis(axis, [row for row, _ in found])
        _legend(axis)
        axis.set_title(f"{benchmark}: new time over old")
    figure.savefig(path, dpi=120)


def draw_efficiencies(curves: Sequence[tuple[str, str, Curve]], path: Path) -> None:
    """Draw efficiency over ranks, a panel for each title.

    Args:
        curves: Title, name, and efficiencies by ranks. Of more titles than panels,
            some evenly spaced ones are drawn.
        path: File to write; its suffix selects the format.
    """
    titles = list(dict.fromkeys(title for title, _, _ in curves))
    titles = titles[:: -(-len(titles) // _PANELS)]
    figure, axes = _figure(len(titles), "efficiency: 1 is perfect")
    for axis, title in zip(axes, titles, strict=False):
        found = [(name, curve) for each, name, curve in curves if each == title]
        looks = itertools.cycle(zip(_COLORS, _MARKERS, strict=True))
        for name, curve in found:
            _line(axis, name, curve, _Look(*next(looks), "-"))
        ranks = sorted({count for _, curve in found for count, _ in curve})
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, map(str, ranks))
        axis.set_xticks([], minor=True)
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.25)
        axis.set_title(title)
        _legend(axis)
    figure.savefig(path, dpi=120)


def _by(things: Iterable[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def _figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    # Not pyplot, which looks for a display and keeps figures.
    from matplotlib.figure import Figure

    columns = min(panels, 2)
    rows = -(-panels // columns)
    size = (_COLUMN * columns, _ROW * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[:panels]:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def _looks(rows: Sequence[Row]) -> dict[str, _Look]:
    """Return a look for each name: hpcaccum, references, plain copies."""
    looks: dict[str, _Look] = {}
    ours = itertools.cycle(zip(_COLORS, _MARKERS, strict=True))
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


def _curves(
    rows: Sequence[Row], value: Callable[[Row], float | None]
) -> Iterator[tuple[str, Curve]]:
    """Yield names and their values over sizes, if there are any."""
    for name, found in _by(rows, lambda row: row.name).items():
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
    _ticks(axis.yaxis, powers, _time_tick)
    _size_axis(axis, rows)
    _legend(axis)


def _bandwidths(axis: Any, rows: Sequence[Row]) -> None:
    looks = _looks(rows)
    for name, curve in _curves(rows, lambda row: row.busbw):
        if name != "copy":
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
    _ticks(axis.yaxis, [10.0**power for power in range(-6, 7)], "{:g}".format)
    _size_axis(axis, rows)
    _legend(axis)


def _limit(row: Row) -> float | None:
    """Return the bus bandwidth at the floor."""
    if row.busbw is None or row.vs_floor is None:
        return None
    return row.busbw * row.vs_floor


def _ranges(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the median and the range to the 99th percentile, for a single size."""
    looks = _looks(rows)
    for place, row in enumerate(reversed(rows)):
        color = looks[row.name].color
        axis.plot([row.min_us, row.p99_us], [place, place], color=color, linewidth=3)
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
    _ticks(axis.xaxis, powers, _time_tick)
    axis.set_xlabel("minimum, median, 99th percentile")
    axis.grid(alpha=0.25, axis="x")


def _time_tick(microseconds: float) -> str:
    """Return a time as ``10 us``, without the zeros of ``10.0 us``."""
    number, _, unit = time_text(microseconds).partition(" ")
    return f"{float(number):g} {unit}"


def _ticks(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Mark the values in the visible range; use default ticks if there are too few."""
    low, high = axis.get_view_interval()
    shown = [value for value in values if low <= value <= high]
    if len(shown) < 2:
        shown = sorted({low, *shown, high})
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


def _size_axis(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_xscale("log", base=2)
    sizes = sorted({row.bytes for row in rows})
    # Every other label if all would overlap.
    shown = sizes[:: -(-len(sizes) // 6)]
    axis.set_xticks(shown, [size_text(size) for size in shown], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)


def _legend(axis: Any) -> None:
    axis.legend(
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
        handlelength=2.4,
    )

"""Panels, the looks of rows, ticks and legends: shared by all pictures."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum.bench.measure import COPY
from hpcaccum.bench.report import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpcaccum.bench import scaling
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
_RAW_COLOR, _COPY_COLOR, FLOOR_COLOR = "0.15", "0.6", "0.88"
_COPIES = (COPY, "copy shared")
_COLUMN, _ROW = 7.2, 4.2


class Look(NamedTuple):
    """How one row is drawn at all sizes."""

    color: str
    marker: str
    style: str


def group_by(things: Iterable[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    """Return lists of things by their key, in order."""
    groups: dict[str, list[Any]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def make_figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, two in a row."""
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


def looks_of(rows: Iterable[Row | scaling.Curve]) -> dict[str, Look]:
    """Return a look for each name: hpcaccum, references, plain copies."""
    looks: dict[str, Look] = {}
    ours = itertools.cycle(zip(_COLORS, _MARKERS, strict=True))
    others = itertools.cycle("sDv^")
    for row in rows:
        if row.name in looks:
            continue
        if row.name in _COPIES:
            looks[row.name] = Look(_COPY_COLOR, ".", ":")
        elif row.reference:
            looks[row.name] = Look(_RAW_COLOR, next(others), "--")
        else:
            looks[row.name] = Look(*next(ours), "-")
    return looks


def draw_line(axis: Any, name: str, curve: Curve, look: Look) -> None:
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


def time_tick(microseconds: float) -> str:
    """Return a time as ``10 us``, without the zeros of ``10.0 us``."""
    number, _, unit = time_text(microseconds).partition(" ")
    return f"{float(number):g} {unit}"


def set_ticks(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Mark the values in the visible range; use default ticks if there are too few."""
    low, high = axis.get_view_interval()
    shown = [value for value in values if low <= value <= high]
    if len(shown) < 2:
        shown = sorted({low, *shown, high})
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


def label_sizes(axis: Any, rows: Sequence[Row]) -> None:
    """Make the horizontal axis that of the sizes of some rows."""
    axis.set_xscale("log", base=2)
    sizes = sorted({row.bytes for row in rows})
    # Every other label if all would overlap.
    shown = sizes[:: -(-len(sizes) // 6)]
    axis.set_xticks(shown, [size_text(size) for size in shown], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.25)


def add_legend(axis: Any) -> None:
    """Add the names beside the panel."""
    axis.legend(
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
        handlelength=2.4,
    )

"""Figures, colors, ticks and legends: shared by the pictures of all commands."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import check_writable

# Okabe and Ito's colors, which most people can distinguish; two more.
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F5539",
    "#6A3D9A",
)
_COLUMN, _ROW = 7.2, 4.2


def check_picture(path: Path | None, cure: str = "pip install matplotlib") -> None:
    """Raise InvalidArgumentError if the file of ``--plot`` cannot be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            f"--plot needs matplotlib, which is not installed: {cure}"
        )
    check_writable("--plot", path)


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
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[:panels]:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def set_ticks(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    """Mark the values in the visible range; use default ticks if there are too few."""
    low, high = axis.get_view_interval()
    shown = [value for value in values if low <= value <= high]
    if len(shown) < 2:
        shown = sorted({low, *shown, high})
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


def add_legend(axis: Any) -> None:
    """Add the names beside the panel."""
    axis.legend(
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
        handlelength=2.4,
    )

"""``hpcaccum bench scaling``: how times grow with ranks and nodes. It needs no MPI."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.plot import add_lines, label_axis
from hpcaccum.bench.report import number_text, print_groups, size_text, time_text
from hpcaccum.bench.rows import read, reading
from hpcaccum.files import json_value, read_lines
from hpcaccum.machine import hosts_and_date
from hpcaccum.plots import group_by, make_figure

_ABOUT = """\
efficiency: 1 is perfect. For a benchmark, it is the time on the fewest ranks
over the time here, as every rank contributes as many bytes; for a training, the
samples per second of a rank over those on the fewest ranks."""
_TRAINING = "training"
_PANELS = 6


class Size(NamedTuple):
    """How large a job was."""

    ranks: int
    nodes: int


class Curve(NamedTuple):
    """One operation, or the training with one strategy, in jobs of several sizes.

    `title` is the benchmark and the size of its arrays, `name` that of the operation or
    strategy. `points` are microseconds, or samples per second.
    """

    title: str
    name: str
    points: dict[Size, float]
    reference: bool = False

    def efficiency(self, size: Size) -> float:
        """Return that of a job, relative to the one with the fewest ranks."""
        first = min(self.points)
        ratio = self.points[first] / self.points[size]
        return first.ranks / size.ranks / ratio if self.title == _TRAINING else ratio

    def cell(self, size: Size) -> str:
        """Return what was measured, and the efficiency."""
        if size not in self.points:
            return "-"
        found = self.points[size]
        training = self.title == _TRAINING
        text = f"{number_text(found)}/s" if training else time_text(found)
        return f"{text} {self.efficiency(size):5.2f}"


def report(files: Sequence[Path], plot: Path | None) -> Callable[[], None]:
    """Return a function that prints how times grow, and draws it."""
    curves: dict[tuple[str, str], Curve] = {}
    for path in files:
        for found in _measured(path):
            curve = curves.setdefault((found.title, found.name), found)
            curve.points.update(found.points)
    grown = [curve for curve in curves.values() if len(curve.points) > 1]
    if not grown:
        raise InvalidArgumentError(
            "the files have no benchmark, name and size, and no strategy, in common "
            "that was measured with different numbers of ranks"
        )
    jobs = [hosts_and_date(json_value(read_lines(path)[0])) for path in files]
    return functools.partial(_show, grown, jobs, plot)


def _measured(path: Path) -> Iterator[Curve]:
    """Yield what was measured in one job: curves of one point."""
    lines = read_lines(path)
    if lines and '"event"' in lines[0]:
        yield from _trained(path, lines)
        return
    for row, facts in read(path).values():
        title = f"{row.benchmark}, {size_text(row.bytes)}"
        points = {Size(facts["ranks"], facts["nodes"]): row.median_us}
        yield Curve(title, row.name, points, row.reference)


def _trained(path: Path, lines: Sequence[str]) -> Iterator[Curve]:
    """Yield what a log of a training says."""
    for number, line in enumerate(lines, 1):
        with reading(path, number, "train --log"):
            facts = json_value(line)
            # A training that continues has appended its own to the log.
            if number == 1 or facts["event"] == "start":
                size = Size(facts["ranks"], len(facts["hosts"]))
            # It is 0 if the training was asked to stop at once, or had been complete.
            if facts["event"] == "result" and facts["samples_per_second"]:
                points = {size: float(facts["samples_per_second"])}
                yield Curve(_TRAINING, facts["strategy"], points)


def _show(curves: list[Curve], jobs: list[str], plot: Path | None) -> None:
    sizes = sorted({size for curve in curves for size in curve.points})
    rows = [
        (f"  {curve.name}", *(curve.cell(size) for size in sizes)) for curve in curves
    ]
    titles = ["", *(f"{size.ranks} on {size.nodes}" for size in sizes)]
    print("ranks on nodes, and efficiency")
    print_groups(titles, rows, [curve.title for curve in curves])
    print(_ABOUT)
    if plot:
        _draw(curves, jobs, plot)
        print(f"picture: {plot}")


def _draw(curves: Sequence[Curve], jobs: Sequence[str], path: Path) -> None:
    """Draw efficiency over ranks, a panel for each title."""
    panels = group_by(curves, lambda curve: curve.title)
    titles = [*panels][:: -(-len(panels) // _PANELS)]
    figure, axes = make_figure(
        len(titles), "\n".join(["efficiency: 1 is perfect", *dict.fromkeys(jobs)])
    )
    for axis, title in zip(axes, titles, strict=False):
        points = [
            (curve, size.ranks, curve.efficiency(size))
            for curve in panels[title]
            for size in sorted(curve.points)
        ]
        add_lines(axis, points)
        ranks = sorted({x for _, x, _ in points})
        axis.axhline(1, color="0.5", linewidth=1)
        axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))
        axis.set_xlabel("ranks")
        axis.set_title(title)
        label_axis(axis, ranks, [str(each) for each in ranks])
    figure.savefig(path)

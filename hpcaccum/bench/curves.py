"""What one operation, or one training, takes in jobs of several sizes."""

from __future__ import annotations

from typing import NamedTuple

from hpcaccum.bench.report import number_text, time_text

TRAINING = "training"


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
        return first.ranks / size.ranks / ratio if self.title == TRAINING else ratio

    def cell(self, size: Size) -> str:
        """Return what was measured, and the efficiency."""
        if size not in self.points:
            return "-"
        found = self.points[size]
        training = self.title == TRAINING
        text = f"{number_text(found)}/s" if training else time_text(found)
        return f"{text} {self.efficiency(size):5.2f}"

"""``hpcaccum bench compare``: what became slower. It needs no MPI.

Machines are shared, and slow down as a whole. So a row is judged by the ratio to its
reference, which was measured in turns with it: MPI's call or a plain copy.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.report import number_text, size_text, time_text
from hpcaccum.bench.row_files import read
from hpcaccum.errors import counted
from hpcaccum.machine import place_and_date
from hpcaccum.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpcaccum.bench.measure import Row
    from hpcaccum.bench.row_files import Key, Rows

# Circumstances that must be the same for times to be comparable, and their names.
_SAME = {
    "hosts": "hosts",
    "ranks_per_node": "ranks per node",
    "cpu": "CPU",
    "cores": "cores",
    "mpi_version": "MPI version",
    "settings": "settings",
    "numpy": "NumPy",
}

_TITLES = "size", "", "old", "new", "time", "ratio", "noise", "reference", ""
_ABOUT = """\
time: new over old; ratio: relative to the reference's; above 1 is slower
noise: how much the ratio may vary, from the quartiles of the times
undecided: within this noise, the row may be slower, or not"""


class Change(NamedTuple):
    """A row of the old file, and that of the new one.

    Attributes:
        old, new: The rows.
        reference: The same of the row that they are compared with; None if this is a
            reference, or there is none in both files.
    """

    old: Row
    new: Row
    reference: Change | None = None

    @property
    def time(self) -> float:
        """The new median time over the old one."""
        return self.new.median_us / self.old.median_us

    @property
    def ratio(self) -> float:
        """The new time over the old one, each relative to the reference's."""
        return self.time / (self.reference.time if self.reference else 1)

    @property
    def noise(self) -> float:
        """How much the ratio may vary, as a fraction; 0 if no spread is known."""
        rows = [self.old, self.new]
        if self.reference:
            rows += [self.reference.old, self.reference.new]
        return math.hypot(*(_spread(row) for row in rows))

    def verdict(self, tolerance: float) -> str:
        """Return "slower", "not slower" or "undecided"; "" for references.

        It is undecided if the ratio may be above 1 + tolerance, or may not.
        """
        if self.new.reference:
            return ""
        if self.ratio / (1 + self.noise) > 1 + tolerance:
            return "slower"
        certain = self.ratio * (1 + self.noise) <= 1 + tolerance
        return "not slower" if certain else "undecided"


def _spread(row: Row) -> float:
    """Return the distance of the quartiles over the median."""
    return (row.spread_us or 0) / row.median_us


def comparison(
    old: Path, new: Path, tolerance: float, plot: Path | None
) -> Callable[[], int]:
    """Return a function that prints the comparison and returns the exit status.

    The status is 1 if a row of hpcaccum became slower, relative to its reference, by
    more than the fraction ``tolerance`` and the noise; else 2 if the noise of a row
    could hide that; else 0. References are shown as well, with their own times.
    """
    before, after = read(old), read(new)
    common = [key for key in before if key in after]
    if not common:
        raise InvalidArgumentError(
            f"{old} and {new} have no benchmark, name, size, number of ranks and MPI "
            f"in common"
        )
    notes = [
        *_differences(before, after, common),
        *_alone(before, after, old),
        *_alone(after, before, new),
    ]
    changes = _changes(before, after, common)
    places = [place_and_date(rows[common[0]].facts) for rows in (before, after)]
    return functools.partial(_show, changes, notes, tolerance, plot, places)


def _changes(before: Rows, after: Rows, common: list[Key]) -> list[Change]:
    plain = {key: Change(before[key].row, after[key].row) for key in common}
    references = [key for key in common if plain[key].new.reference]

    def reference(key: Key) -> Change | None:
        """Return that of the raw call, or else the first one of the size."""
        benchmark, _, *rest = key
        raw = plain[key].new.raw
        for other in references:
            fits = other[0] == benchmark and [*other[2:]] == rest
            if fits and raw in (None, other[1]):
                return plain[other]
        return None

    return [
        change if change.new.reference else change._replace(reference=reference(key))
        for key, change in plain.items()
    ]


def _differences(before: Rows, after: Rows, common: list[Key]) -> Iterator[str]:
    """Yield circumstances that differ."""
    for fact, name in _SAME.items():
        pairs = {
            (str(before[key].facts.get(fact)), str(after[key].facts.get(fact)))
            for key in common
        }
        for old, new in sorted(pairs):
            if old != new:
                yield f"other {name}: {old} before, {new} now"


def _alone(here: Rows, there: Rows, path: Path) -> Iterator[str]:
    if missing := len(here.keys() - there.keys()):
        yield f"only in {path}: {counted(missing, 'row')}"


def _show(
    changes: list[Change],
    notes: list[str],
    tolerance: float,
    plot: Path | None,
    places: list[str],
) -> int:
    for line in _table(changes, tolerance):
        print(line)
    for note in [*notes, *_machine(changes, tolerance)]:
        print(note)
    verdicts = [change.verdict(tolerance) for change in changes]
    slower, undecided = map(verdicts.count, ("slower", "undecided"))
    print(
        f"{counted(len(changes), 'row')} compared, {slower} slower by more than "
        f"{tolerance:.0%} and the noise, {undecided} undecided"
    )
    if plot:
        from hpcaccum.bench.plot import draw_changes

        draw_changes(changes, tolerance, places, plot)
        print(f"picture: {plot}")
    return 1 if slower else 2 if undecided else 0


def _table(changes: list[Change], tolerance: float) -> Iterator[str]:
    """Yield the lines of the table, with a title above each benchmark."""
    heads = [(change.new.benchmark, change.new.bytes) for change in changes]
    rows = [
        _cells("" if head == above else size_text(head[1]), change, tolerance)
        for change, head, above in zip(changes, heads, [None, *heads], strict=False)
    ]
    titles, rule, *lines = table(_TITLES, rows, left=(1, 7, 8))
    yield from (titles, rule)
    for line, head, above in zip(lines, heads, [None, *heads], strict=False):
        if above is None or above[0] != head[0]:
            yield head[0]
        yield line
    yield _ABOUT


def _cells(size: str, change: Change, tolerance: float) -> list[str]:
    """Return a row of the table; without a reference, the ratio is that of times."""
    ratio, noise, reference = number_text(change.ratio), f"{change.noise:.0%}", "-"
    if change.new.reference:
        ratio = noise = "-"
    else:
        reference = change.reference.new.name if change.reference else "none: times"
    times = time_text(change.old.median_us), time_text(change.new.median_us)
    more = number_text(change.time), ratio, noise, reference
    return [size, change.new.name, *times, *more, change.verdict(tolerance)]


def _machine(changes: list[Change], tolerance: float) -> Iterator[str]:
    """Yield how the times of the references changed, if there are any."""
    times = [change.time for change in changes if change.new.reference]
    if not times:
        return
    median = float(np.median(times))
    text = f"the references took {number_text(median)} times as long"
    if not 1 / (1 + tolerance) <= median <= 1 + tolerance:
        word = "slower" if median > 1 else "faster"
        text += f": the machine was {word} as a whole"
    yield text

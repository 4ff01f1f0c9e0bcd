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
from hpcaccum.bench.rows import read
from hpcaccum.errors import counted
from hpcaccum.machine import place_and_date
from hpcaccum.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpcaccum.bench.rows import Key, Row, Rows

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
        return math.hypot(*((row.spread_us or 0) / row.median_us for row in rows))

    def verdict(self, tolerance: float) -> str:
        """Return "slower", "not slower" or "undecided"; "" for references."""
        if self.new.reference:
            return ""
        if self.ratio / (1 + self.noise) > 1 + tolerance:
            return "slower"
        certain = self.ratio * (1 + self.noise) <= 1 + tolerance
        return "not slower" if certain else "undecided"


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
    changes = _changes(before, after, common)
    facts = before[common[0]].facts, after[common[0]].facts
    notes = [
        f"other {name}: {facts[0].get(fact)} before, {facts[1].get(fact)} now"
        for fact, name in _SAME.items()
        if facts[0].get(fact) != facts[1].get(fact)
    ]
    for path, found in (old, before), (new, after):
        if len(found) > len(common):
            alone = counted(len(found) - len(common), "row")
            notes.append(f"only in {path}: {alone}")
    places = [place_and_date(each) for each in facts]
    return functools.partial(_show, changes, notes, tolerance, plot, places)


def _changes(before: Rows, after: Rows, common: list[Key]) -> list[Change]:
    plain = {key: Change(before[key].row, after[key].row) for key in common}

    def reference(key: Key, change: Change) -> Change | None:
        """Return that of the raw call, or else the first one of the size."""
        for other, candidate in plain.items():
            fits = (other[0], *other[2:]) == (key[0], *key[2:])
            named = change.new.raw in (None, candidate.new.name)
            if fits and named and candidate.new.reference:
                return candidate
        return None

    return [
        change
        if change.new.reference
        else change._replace(reference=reference(key, change))
        for key, change in plain.items()
    ]


def _show(
    changes: list[Change],
    notes: list[str],
    tolerance: float,
    plot: Path | None,
    places: list[str],
) -> int:
    print(*_table(changes, tolerance), *notes, sep="\n")
    times = [change.time for change in changes if change.new.reference]
    if times:
        print(_machine(float(np.median(times)), tolerance))
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
    above = [None, *heads]
    cells = [
        _cells("" if head == last else size_text(head[1]), change, tolerance)
        for change, head, last in zip(changes, heads, above, strict=False)
    ]
    titles, rule, *lines = table(_TITLES, cells, left=(1, 7, 8))
    yield from (titles, rule)
    for line, head, last in zip(lines, heads, above, strict=False):
        if last is None or last[0] != head[0]:
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


def _machine(times: float, tolerance: float) -> str:
    """Return how the times of the references changed."""
    text = f"the references took {number_text(times)} times as long"
    if 1 / (1 + tolerance) <= times <= 1 + tolerance:
        return text
    word = "slower" if times > 1 else "faster"
    return f"{text}: the machine was {word} as a whole"

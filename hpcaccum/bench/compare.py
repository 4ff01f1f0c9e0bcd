"""``hpcaccum bench compare``: what became slower. It needs no MPI."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.measure import Row
from hpcaccum.bench.report import number_text, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Key = tuple[str, str, int, int, str]
    Rows = dict[Key, "Measured"]

_FIELDS = [field.name for field in dataclasses.fields(Row)]
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


class Measured(NamedTuple):
    """A row of a file, and its circumstances."""

    row: Row
    facts: Mapping[str, Any]


class Change(NamedTuple):
    """A row of the old file, and that of the new one."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """The new median time over the old one."""
        return self.new.median_us / self.old.median_us

    def slower(self, tolerance: float) -> bool:
        """Whether hpcaccum became slower than allowed."""
        return not self.new.reference and self.ratio > 1 + tolerance


def read(path: Path) -> Rows:
    """Return the rows of a file that ``--json`` wrote; of equal ones the last.

    Raises:
        InvalidArgumentError: If it cannot be read, or is not such a file.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidArgumentError(f"{path}: {reason}") from None
    rows: Rows = {}
    for number, line in enumerate(lines, 1):
        try:
            facts = json.loads(line)
            row = Row(**{name: facts[name] for name in _FIELDS})
            key = row.benchmark, row.name, row.bytes, facts["ranks"], facts["mpi"]
            usable = row.median_us > 0
        except (ValueError, TypeError, KeyError):
            usable = False
        if not usable:
            raise InvalidArgumentError(
                f"{path}: line {number} is not what hpcaccum bench --json writes"
            )
        rows[key] = Measured(row, facts)
    if not rows:
        raise InvalidArgumentError(f"{path}: empty")
    return rows


def comparison(
    old: Path, new: Path, tolerance: float, plot: Path | None
) -> Callable[[], int]:
    """Return a function that prints the comparison and returns the exit status.

    The status is 1 if a median of hpcaccum in the new file is longer than the old one
    by more than the fraction ``tolerance``, else 0. MPI's own calls and plain copies
    are shown as well: they show how similar the machines were.

    Raises:
        InvalidArgumentError: If a file cannot be used, or they have no row in common.
    """
    before, after = read(old), read(new)
    common = [key for key in before if key in after]
    if not common:
        raise InvalidArgumentError(
            f"{old} and {new} have no benchmark, name, size, number of ranks and MPI "
            f"in common"
        )
    changes = [Change(before[key].row, after[key].row) for key in common]
    notes = [
        *_differences(before, after, common),
        *_alone(before, after, old),
        *_alone(after, before, new),
    ]
    return functools.partial(_show, changes, notes, tolerance, plot)


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
        yield f"only in {path}: {missing} row{'' if missing == 1 else 's'}"


def _show(
    changes: list[Change], notes: list[str], tolerance: float, plot: Path | None
) -> int:
    slower = sum(change.slower(tolerance) for change in changes)
    print(
        f"{'':11} {'':13} {'size':>7} {'old':>8} {'new':>8} {'ratio':>5}   "
        f"vs MPI old, new"
    )
    title = ""
    for change in changes:
        shown = "" if change.new.benchmark == title else change.new.benchmark
        title = change.new.benchmark
        print(_line(shown, change, tolerance))
    for note in notes:
        print(note)
    print(f"{len(changes)} rows compared, {slower} slower by more than {tolerance:.0%}")
    if plot:
        _draw(changes, tolerance, plot)
        print(f"picture: {plot}")
    return 1 if slower else 0


def _line(benchmark: str, change: Change, tolerance: float) -> str:
    old, new, ratio = change.old, change.new, change.ratio
    verdict = "slower" if change.slower(tolerance) else ""
    if ratio < 1 / (1 + tolerance) and not new.reference:
        verdict = "faster"
    return (
        f"{benchmark:11} {new.name:13} {size_text(new.bytes):>7} "
        f"{time_text(old.median_us):>8} {time_text(new.median_us):>8} "
        f"{number_text(ratio):>5}   {number_text(old.vs_mpi):>6} "
        f"{number_text(new.vs_mpi):>6}  {verdict}"
    ).rstrip()


def _draw(changes: list[Change], tolerance: float, path: Path) -> None:
    from hpcaccum.bench.plot import draw_ratios

    title = f"grey: at most {tolerance:.0%} slower or faster"
    draw_ratios([(each.new, each.ratio) for each in changes], tolerance, title, path)

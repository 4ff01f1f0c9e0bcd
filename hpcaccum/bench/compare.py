"""``hpcaccum bench compare``: what became slower. It needs no MPI.

Machines are shared, and slow down as a whole. So a row is judged by the ratio to its
reference, which was measured in turns with it: MPI's call or a plain copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.report import number_text, print_groups, size_text, time_text
from hpcaccum.bench.rows import Key, Rows, read
from hpcaccum.errors import counted

# Circumstances that must be the same for times to be comparable.
_SAME = "hosts", "ranks_per_node", "cpu", "cores", "mpi_version", "settings", "numpy"
_TITLES = "size", "", "old", "new", "time", "ratio", "noise", "reference", ""
_ABOUT = """\
time: new over old; ratio: relative to the reference's; above 1 is slower
noise: how much the ratio may vary, from the quartiles of the times
undecided: within this noise, the row may be slower, or not"""


def comparison(old: Path, new: Path, tolerance: float) -> Callable[[], int]:
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
    facts = before[common[0]][1], after[common[0]][1]
    notes = [
        f"other {name}: {facts[0].get(name)} before, {facts[1].get(name)} now"
        for name in _SAME
        if facts[0].get(name) != facts[1].get(name)
    ]
    for path, found in (old, before), (new, after):
        if alone := len(found) - len(common):
            notes.append(f"only in {path}: {counted(alone, 'row')}")
    times = [
        after[key][0].median_us / before[key][0].median_us
        for key in common
        if after[key][0].reference
    ]
    if times:
        factor = float(np.median(times))
        text = f"the references took {number_text(factor)} times as long"
        if not 1 / (1 + tolerance) <= factor <= 1 + tolerance:
            word = "slower" if factor > 1 else "faster"
            text += f": the machine was {word} as a whole"
        notes.append(text)
    rows = [_cells(key, before, after, 1 + tolerance) for key in common]
    for number in range(1, len(rows)):
        if common[number][:2] == common[number - 1][:2]:
            # The same benchmark and size as above.
            rows[number][0] = ""
    groups = [benchmark for benchmark, *_ in common]
    return functools.partial(_show, rows, groups, notes, tolerance)


def _cells(key: Key, before: Rows, after: Rows, limit: float) -> list[str]:
    """Return what is shown of a row of both files; the last cell is the verdict."""
    old, new = before[key][0], after[key][0]
    time = new.median_us / old.median_us
    times = time_text(old.median_us), time_text(new.median_us), number_text(time)
    cells = [size_text(new.bytes), new.name, *times]
    if new.reference:
        return [*cells, "-", "-", "-", ""]
    rows, ratio, reference = [old, new], time, "none: times"
    # The raw call, or else the first one of the size.
    for other, (row, _) in after.items():
        fits = row.reference and other[:-1] == key[:-1] and other in before
        if fits and new.raw in (None, row.name):
            rows += [before[other][0], row]
            ratio, reference = time * rows[2].median_us / row.median_us, row.name
            break
    noise = math.hypot(*(each.spread_us / each.median_us for each in rows))
    verdict = "undecided"
    if ratio / (1 + noise) > limit:
        verdict = "slower"
    elif ratio * (1 + noise) <= limit:
        verdict = "not slower"
    return [*cells, number_text(ratio), f"{noise:.0%}", reference, verdict]


def _show(
    rows: list[list[str]], groups: list[str], notes: list[str], tolerance: float
) -> int:
    print_groups(_TITLES, rows, groups, left=(1, 7, 8))
    print(_ABOUT, *notes, sep="\n")
    verdicts = [cells[-1] for cells in rows]
    slower, undecided = map(verdicts.count, ("slower", "undecided"))
    print(
        f"{counted(len(rows), 'row')} compared, {slower} slower by more than "
        f"{tolerance:.0%} and the noise, {undecided} undecided"
    )
    return 1 if slower else 2 if undecided else 0

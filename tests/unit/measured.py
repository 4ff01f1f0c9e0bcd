"""Rows of ``hpcaccum bench`` for tests of what reads or shows them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hpcaccum.bench.rows import Row

_ROW = Row(
    benchmark="allreduce",
    name="zero-copy",
    bytes=4096,
    raw="MPI",
    reference=False,
    samples=9,
    min_us=10.0,
    median_us=10.0,
    p99_us=None,
    max_us=10.0,
    algbw=None,
    busbw=None,
    floor_us=None,
    vs_mpi=None,
    vs_floor=None,
    figures={},
    spread_us=0.0,
)


def row(name="zero-copy", median_us=10.0, **changes) -> Row:
    """Return a row; by default one of hpcaccum that is compared with MPI's."""
    return dataclasses.replace(_ROW, name=name, median_us=median_us, **changes)


def reference(name="MPI", median_us=10.0, **changes) -> Row:
    """Return a row of MPI or of a plain copy."""
    return row(name, median_us, raw=None, reference=True, **changes)


def write(path, rows, **facts: Any) -> None:
    """Write a file as ``--json`` does."""
    facts = {"ranks": 2, "nodes": 1, "mpi": "MPICH", **facts}
    lines = [{**facts, **dataclasses.asdict(each)} for each in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def check_rows(found: list[Row]) -> None:
    """Check that rows of all kinds of a benchmark fit together."""
    names = [row.name for row in found]
    assert len(set(names)) == len(names)
    for row in found:
        last = row.max_us if row.p99_us is None else row.p99_us
        assert 0 < row.min_us <= row.median_us <= last <= row.max_us
        # All quartiles of three times may be among the ends; the differences of seconds
        # and those of microseconds are then rounded otherwise.
        assert 0 <= row.spread_us <= 1.000001 * (row.max_us - row.min_us)
        assert row.samples >= 3
        assert row.raw is None or row.raw in names
    assert {row.reference for row in found} == {True, False}

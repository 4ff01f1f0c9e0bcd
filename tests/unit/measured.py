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

"""The table of ``hpcaccum bench``, and what is above it."""

from __future__ import annotations

import pytest

from hpcaccum.bench import report
from hpcaccum.bench.device import DeviceCase
from hpcaccum.bench.torch_step import TorchStep
from hpcaccum.bench.wire import Wire
from hpcaccum.machine import describe, oversubscribed

from .measured import row

ALL = [
    report.HOST,
    report.BETWEEN_NODES,
    DeviceCase.columns,
    Wire.columns,
    TorchStep.columns,
]


@pytest.mark.parametrize("columns", ALL)
def test_a_table_has_80_columns(columns):
    wide = row("mean rows CuPy", 999.4, bytes=256 << 20, max_us=1e7)
    lines = [*columns.legend.splitlines(), *report.head("x", columns).splitlines()]
    lines += report.lines([wide], columns)

    assert max(map(len, lines)) <= 80


def test_a_row_has_its_samples_and_a_percentile_only_of_many():
    [few] = report.lines([row(samples=99, max_us=30.0)])
    [many] = report.lines([row(samples=100, p99_us=20.0, max_us=30.0)])
    titles = report.head("x").splitlines()[-1].split()

    assert titles[:6] == ["size", "n", "min", "median", "p99", "max"]
    assert few.split()[3:8] == ["99", "10.0", "10.0", "-", "30.0"]
    assert many.split()[3:8] == ["100", "10.0", "10.0", "20.0", "30.0"]


def test_many_samples_are_rounded():
    [line] = report.lines([row(samples=123_456)])

    assert line.split()[3] == "1e+05"


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([("a", {0}), ("a", {1})], None),
        ([("a", {0, 1}), ("a", {0, 1})], None),
        ([("a", {0}), ("a", {0})], ("a", 2, 1)),
        # Each host has its own cores.
        ([("a", {0}), ("b", {0})], None),
        ([("a", {0}), ("b", {0}), ("b", {0})], ("b", 2, 1)),
        ([*[("a", {0, 1})] * 3, *[("b", {0})] * 2], ("b", 2, 1)),
    ],
)
def test_ranks_may_outnumber_the_cores_of_a_host(places, found):
    names = "host", "ranks", "cores"
    expected = None if found is None else dict(zip(names, found, strict=True))

    assert oversubscribed(places) == expected


def test_the_warning_is_below_the_circumstances():
    facts = dict.fromkeys(("mpi", "mpi_version", "cpu", "hpcaccum", "commit"), "x")
    facts |= {"ranks": 3, "hosts": {"a": 3}, "nodes": 1, "cores": 2}
    facts["oversubscribed"] = {"host": "a", "ranks": 3, "cores": 2}
    crowded = describe(facts).splitlines()
    facts["oversubscribed"] = None

    assert crowded[:-1] == describe(facts).splitlines()
    assert crowded[-1] == (
        "warning: 3 ranks share 2 cores of a: the times include waits for a core"
    )

"""``hpcaccum bench``: sizes, floors of links, counters of interfaces, tables."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from hpcaccum import cli
from hpcaccum.bench import report
from hpcaccum.bench.device import DeviceCase
from hpcaccum.bench.links import Interfaces
from hpcaccum.bench.measure import sum_everywhere, update_each
from hpcaccum.bench.options import add_arguments, sizes, sizes_of
from hpcaccum.bench.torch_step import TorchStep
from hpcaccum.bench.wire import Wire
from hpcaccum.machine import describe, oversubscribed

from .measured import row

K, M = 1 << 10, 1 << 20

GOOD = {
    "128": [128],
    "4K": [4 * K],
    "1GiB": [1 << 30],
    "1K,4K": [K, 4 * K],
    "4K:1M": [4 * K, 16 * K, 64 * K, 256 * K, M],
    "4K:1023K": [4 * K, 16 * K, 64 * K, 256 * K],
    "4K:32K:2": [4 * K, 8 * K, 16 * K, 32 * K],
    "1K:1M:1024": [K, M],
    "4K:4K": [4 * K],
    "1K,4K:16K,1M": [K, 4 * K, 16 * K, M],
}


@pytest.mark.parametrize("text", GOOD)
def test_sizes_and_ranges(text):
    assert sizes(text) == GOOD[text]


BAD = {
    "": "must be a number, optionally with K, M or G, ",
    "4K,": "or a range such as 4K:256M or 4K:256M:2, got ''",
    "4K:": "or a range such as 4K:256M or 4K:256M:2, got '4K:'",
    ":4K": "or a range such as 4K:256M or 4K:256M:2, got ':4K'",
    "4X:1M": "or a range such as 4K:256M or 4K:256M:2, got '4X:1M'",
    "0": "must be a multiple of 128 bytes, got '0'",
    "100:1M": "must be a multiple of 128 bytes, got '100:1M'",
    "1M:4K": "must be a range from a smaller to a larger size, ",
    "4K:1M:1": "with a factor from 2 on, got '4K:1M:1'",
    "4K:1M:0": "with a factor from 2 on, got '4K:1M:0'",
    "4K:1M:-2": "a range such as 4K:256M or 4K:256M:2, got '4K:1M:-2'",
    "4K:1M:2:2": "a range such as 4K:256M or 4K:256M:2, got '4K:1M:2:2'",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        sizes(text)

    assert BAD[text] in str(error.value)


def test_each_size_is_measured_once():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["allreduce", "--sizes", "1K,4K:16K", "4K:64K", "256K"]
    found = sizes_of(parser.parse_args(words).sizes, "allreduce")

    assert found == [K, 4 * K, 16 * K, 64 * K, 256 * K]


HELP = {
    "bench allreduce": "- zero-copy: in place in the reducer's arrays.",
    "bench wire": "has all powers of two (4K,1M,16M) --seconds",
    "bench all": "one after the other: accumulate, allreduce, step",
    "train": "usage: hpcaccum train",
    "": "usage: hpcaccum",
}


@pytest.mark.parametrize("words", HELP)
def test_help_needs_no_mpi(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*words.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())

    assert left.value.code == 0
    assert HELP[words] in shown
    assert "Args:" not in shown


# The floors of the links, each reached by a way to send the bytes that is written out


SHAPES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 2), (5, 8)]


def busiest(messages):
    """Return the most bytes out of a node, or into one."""
    out, into = Counter(), Counter()
    for source, target, size in messages:
        if source != target:
            out[source] += size
            into[target] += size
    return max([*out.values(), *into.values()], default=0)


def pairs(nodes):
    return [(a, b) for a in range(nodes) for b in range(nodes)]


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_floors_of_links(nodes, ranks):
    stripes = [(a, b, 1 / nodes) for a, b in pairs(nodes)]  # of sums of the nodes
    back = [(b, a, 1 / nodes) for a, b in pairs(nodes)]

    assert busiest(stripes + back) == pytest.approx(sum_everywhere(nodes))
    floor = update_each(nodes, nodes * ranks)
    assert busiest(ranks * stripes + back) == pytest.approx(floor)


# The counters of network interfaces, read from a directory as the kernel's


ETHERNET, LOOPBACK = 1, 772


@pytest.fixture
def interface(tmp_path):
    """Add an interface."""

    def make(name, sent, received, kind=ETHERNET, lower=()):
        counters = tmp_path / name / "statistics"
        counters.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (counters / "tx_bytes").write_text(f"{sent}\n")
        (counters / "rx_bytes").write_text(f"{received}\n")
        for each in lower:
            (tmp_path / name / f"lower_{each}").symlink_to(tmp_path / each)

    return make


def test_all_interfaces_but_loopback_are_added(tmp_path, interface):
    interface("lo", 10**15, 10**15, LOOPBACK)
    interface("eth0", 100, 20)
    interface("ib0", 3, 4, 32)
    found = Interfaces(tmp_path)

    assert found.names == ["eth0", "ib0"]
    assert found.read() == (103, 24)


def test_what_passes_its_bytes_on_is_not_counted_twice(tmp_path, interface):
    interface("eth0", 1, 2)
    interface("eth1", 10, 20)
    interface("bond0", 11, 22, lower=("eth0", "eth1"))

    assert Interfaces(tmp_path).read() == (11, 22)


def test_what_has_no_counters_is_left_out(tmp_path, interface):
    (tmp_path / "bonding_masters").write_text("bond0\n")
    (tmp_path / "odd").mkdir()
    interface("eth1", 10, 20)

    assert Interfaces(tmp_path).names == ["eth1"]


def test_a_system_without_counters_has_no_interface(tmp_path):
    found = Interfaces(tmp_path / "net")

    assert found.names == []
    assert found.read() == (0, 0)


# The table, and what is above it


ALL = [report.USUAL, DeviceCase.columns, Wire.columns, TorchStep.columns]


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

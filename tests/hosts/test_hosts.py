"""Ranks on several hosts, with a network between them and shared memory within.

Where no hosts can be made these tests are skipped, unless HPCACCUM_REQUIRE_HOSTS=1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, hosts

from ..common import json_lines

REPOSITORY = Path(__file__).parents[2]

# Seconds; a job here takes 2 to 20.
WAIT = 300

# Every strategy and storage, every schedule for ranks that do not share memory, and a
# server on each host.
TESTS = tuple(
    f"tests/mpi/test_{name}.py"
    for name in ("plain_model", "schedules", "servers", "sparse_nodes")
)
SELECTED = (
    "plain_model and (real or not as_one)"
    " or (flat or hierarchical) and not (apart or uneven)"
    " and (means_equal_numpy or wire_format or sums_are_not_divided)"
    " or real and (of_one_step or applied_in_order or Adam or plain_formulas or behind)"
)


@pytest.fixture(scope="module", params=[2, 4], ids=["2-hosts", "4-hosts"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("hosts")
    with hosts(directory, request.param, rate="1gbit") as running:
        yield running


def test_results_are_those_of_one_process(cluster: Cluster):
    pytest_options = ("-q", "-k", SELECTED, "--color=no")
    program = (sys.executable, "-m", "pytest", *TESTS, *pytest_options)
    # 4 ranks on all hosts.
    ranks = 4 // len(cluster.names)
    done = cluster.run(ranks, *program, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout, done.stdout


def test_bytes_of_each_strategy_are_counted(tmp_path: Path):
    directory, file = tmp_path / "hosts", tmp_path / "rows.json"
    directory.mkdir()
    options = ("--sizes", "256K", "--seconds", "0.1", "--json", str(file))
    command = (sys.executable, "-m", "hpcaccum", "bench", "wire", *options)
    with hosts(directory, 3, rate="1gbit") as cluster:
        done = cluster.run(2, *command, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    assert "bytes counted by eth0 of each of 3 nodes" in done.stdout
    rows = {row["name"]: row for row in json_lines(file)}
    for name, row in rows.items():
        figures = row["figures"]
        counted, must = (
            figures["bytes on the busiest link"],
            figures["bytes that must cross a link"],
        )
        # Also those of headers, so never less.
        assert counted > must, name
    # Only half of the bytes.
    for half, whole in ("sync, half", "sync, servers"), ("fragm., half", "fragments"):
        link, other = (
            rows[name]["figures"]["bytes on the busiest link"] for name in (half, whole)
        )
        assert 0.5 < link / other < 0.6
    exchanged = rows["exchange"]["figures"]
    # Each of the four figures of links is the vector of one node.
    links = [value for what, value in exchanged.items() if "node" in what]
    assert len(links) == 4
    assert all(1 < value < 1.5 for value in links), links

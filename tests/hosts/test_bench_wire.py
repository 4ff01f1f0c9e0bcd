"""``hpcaccum bench wire`` counts the bytes that cross the links of hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts, obstacle

REPOSITORY = Path(__file__).parents[2]
SIZE = 1 << 18

# Seconds; it takes 10.
WAIT = 300


def test_bytes_of_each_strategy_are_counted(tmp_path: Path):
    if reason := obstacle():
        pytest.skip(f"hosts {reason}")
    directory, file = tmp_path / "hosts", tmp_path / "rows.json"
    directory.mkdir()
    options = ("--sizes", str(SIZE), "--seconds", "0.1", "--json", str(file))
    command = (sys.executable, "-m", "hpcaccum", "bench", "wire", *options)
    with hosts(directory, 3, rate="1gbit") as cluster:
        done = cluster.run(2, *command, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    assert "bytes counted by eth0 of each of 3 nodes" in done.stdout
    rows = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
    for name, row in rows.items():
        figures = row["figures"]
        counted, must = (
            figures["bytes on the busiest link"],
            figures["bytes that must cross a link"],
        )
        # Also those of headers, so never less.
        assert counted > must, name
    # Only half of the bytes.
    for half, whole in ("sync, half", "sync, sharded"), ("fragm., half", "fragments"):
        link, other = (
            rows[name]["figures"]["bytes on the busiest link"] for name in (half, whole)
        )
        assert 0.5 < link / other < 0.6
    exchanged = rows["exchange"]["figures"]
    # Of the four figures of links, each is the vector of one node.
    links = [value for what, value in exchanged.items() if "node" in what]
    assert len(links) == 4
    assert all(1 < value < 1.5 for value in links), links

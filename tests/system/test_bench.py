"""``hpcaccum bench`` as people start it: what it writes, and how it ends."""

from __future__ import annotations

import csv
import functools
import json
import struct

import pytest

from ..common import json_lines, status_of

BENCHMARKS = ["accumulate", "allreduce", "step"]
QUICK = "--sizes", "4K", "64K", "--seconds", "0.05"
TIMES = ["min_us", "median_us", "max_us"]


@pytest.fixture
def bench(patched, tmp_path):
    """Run ``hpcaccum bench`` on some ranks, in an empty directory."""
    return functools.partial(run_bench, patched, tmp_path)


def run_bench(patched, directory, ranks, *options, status=0, before=""):
    words = "bench", *options
    return patched(ranks, before, *words, cwd=directory, status=status).stdout


@pytest.fixture(scope="module")
def measured(patched, tmp_path_factory):
    """The file of an allreduce on 2 ranks."""
    directory = tmp_path_factory.mktemp("measured")
    run_bench(patched, directory, 2, "allreduce", *QUICK, "--json", "rows.json")
    return directory / "rows.json"


def test_table_files_and_picture(bench, tmp_path):
    ranks, files = 3, ("--json", "rows.json", "--csv", "rows.csv", "--plot", "rows.png")
    shown = bench(ranks, "all", *QUICK, *files)

    assert shown.startswith(f"{ranks} ranks on ")
    assert max(map(len, shown.splitlines()[2:])) <= 80
    rows = json_lines(tmp_path / "rows.json")
    assert list(dict.fromkeys(row["benchmark"] for row in rows)) == BENCHMARKS
    for row in rows:
        assert row["ranks"] == row["ranks_per_node"] == sum(row["hosts"].values())
        assert row["ranks"] == ranks
        assert row["bytes"] in (4096, 65536)
        assert row["mpi"] in ("MPICH", "Open MPI")
        assert row["command"][:3] == ["hpcaccum", "bench", "all"]
        assert row["cores"] >= 1
        for fact in "date", "mpi_version", "cpu", "hpcaccum":
            assert row[fact]
        times = [row[name] for name in TIMES]
        assert times == sorted(times)
        assert (row["p99_us"] is None) == (row["samples"] < 100)
        assert f"{row['name']:13} {row['samples']:5} " in shown
        assert ("\nwarning: " in shown) == (row["oversubscribed"] is not None)
        assert row["name"] in shown
    check_table(tmp_path / "rows.csv", rows)
    for name in BENCHMARKS:
        assert f"\n\n{name}\n" in shown
    picture = (tmp_path / "rows.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">I", picture[16:20]) == (1728,)


def check_table(path, rows):
    """Compare a file of ``--csv`` with the rows of ``--json``."""
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(rows)
    for cells, row in zip(found, rows, strict=True):
        assert list(cells) == list(row)
        for name, value in row.items():
            text = json.dumps(value) if isinstance(value, (dict, list)) else value
            assert cells[name] == ("" if text is None else str(text))


@pytest.mark.mpi
def test_a_size_that_does_not_fit_is_skipped(bench, tmp_path):
    shown = bench(2, "allreduce", "--sizes", "4096G", "4K", "--seconds", "0.05")

    assert "4096 GiB skipped: needs " in shown
    assert "4 KiB zero-copy" in shown


@pytest.mark.mpi
def test_wire_on_one_node_names_what_to_use_instead(bench, tmp_path):
    nodes = "import os; os.environ['MPIR_CVAR_NOLOCAL'] = '0'"
    shown = bench(2, "wire", *QUICK, "--json", "rows.json", before=nodes, status=2)

    assert not (tmp_path / "rows.json").exists()
    assert shown.count("all ranks are on one node, and nothing crosses a wire: ") == 1
    assert "hpcaccum bench step" in shown
    assert "sync-replicas" not in shown


@pytest.mark.mpi
def test_a_wrong_answer_ends_the_job(bench):
    plant = """
from hpcaccum import ConditionalAccumulator
take = ConditionalAccumulator.take_grad
ConditionalAccumulator.take_grad = lambda *args, **options: take(*args, **options) + 1
"""
    shown = bench(2, "accumulate", *QUICK, before=plant, status=1)

    assert "accumulate 4 KiB, round: 1024 of 1024 elements are wrong" in shown


def test_compare_reads_what_bench_writes(measured, tmp_path, capsys):
    def compare(name, change):
        lines = [{**each, **change(each)} for each in json_lines(measured)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name).write_text(text)
        files = str(measured), str(tmp_path / name)
        status = status_of("bench", "compare", *files)
        return status, capsys.readouterr()

    status, shown = compare("same.json", lambda row: {})
    assert status in (0, 2), shown.out  # 2 if the times vary too much
    assert "12 rows compared, 0 slower" in shown.out
    ours = lambda row: 1 if row["reference"] else 100  # noqa: E731
    slow = compare("slow.json", lambda row: {"median_us": ours(row) * row["median_us"]})
    assert slow[0] == 1
    status, shown = compare("other.json", lambda row: {"ranks": 4})
    assert status == 2
    assert "in common" in shown.err

"""``hpcaccum bench`` as people start it: what it writes, and how it ends."""

from __future__ import annotations

import csv
import functools
import json
import struct
import sys

import pytest

from .conftest import REPOSITORY, run_program

BENCHMARKS = ["accumulate", "allreduce", "step"]
QUICK = "--sizes", "4K", "64K", "--seconds", "0.05"
TIMES = ["min_us", "median_us", "max_us"]


@pytest.fixture
def bench(mpirun, tmp_path):
    """Run ``hpcaccum bench`` on some ranks, in an empty directory."""
    return functools.partial(run_bench, mpirun, tmp_path)


def run_bench(mpirun, directory, ranks, *options, status=0, before=""):
    script = directory / "script.py"
    script.write_text(
        f"import sys\n{before}\n"
        "from hpcaccum.cli import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main())\n"
    )
    env = {"PYTHONPATH": str(REPOSITORY)}
    result = mpirun(ranks, script, "bench", *options, cwd=directory, env=env)
    assert status is None or result.returncode == status, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def measured(mpirun, tmp_path_factory):
    """The file of an allreduce on 2 ranks."""
    directory = tmp_path_factory.mktemp("measured")
    run_bench(mpirun, directory, 2, "allreduce", *QUICK, "--json", "rows.json")
    return directory / "rows.json"


# Runs one command after another; writes the status and the output of each.
COMPARE = """
import contextlib, io, json, pathlib, sys
sys.modules["mpi4py"] = None
from hpcaccum.cli import main

def attempt(words):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = main(["bench", "compare", *words])
        except SystemExit as leaving:
            status = leaving.code
    return status, shown.getvalue()

attempts = [attempt(words) for words in {}]
pathlib.Path("attempts.json").write_text(json.dumps(attempts))
"""


@pytest.fixture
def compare(tmp_path):
    """Run ``hpcaccum bench compare`` where there is no MPI, once or several times.

    One process makes all comparisons: what takes time is to start it.
    """

    def run(*commands):
        program = COMPARE.format([list(map(str, words)) for words in commands])
        command = [sys.executable, "-c", program]
        env = {"PYTHONPATH": str(REPOSITORY)}
        result = run_program(command, timeout=200, cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stdout
        return json.loads((tmp_path / "attempts.json").read_text())

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_table_files_and_picture(bench, tmp_path):
    ranks, files = 3, ("--json", "rows.json", "--csv", "rows.csv", "--plot", "rows.png")
    shown = bench(ranks, "all", *QUICK, *files)

    assert shown.startswith(f"{ranks} ranks on ")
    assert max(map(len, shown.splitlines()[2:])) <= 80
    rows = read(tmp_path / "rows.json")
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
def test_ranks_without_a_core_of_their_own_are_a_warning(bench, tmp_path):
    core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    words = "allreduce", "--sizes", "4K", "--seconds", "0.01", "--json", "rows.json"
    shown = bench(2, *words, before=core)

    assert shown.count("warning: 2 ranks share 1 core of ") == 1
    for row in read(tmp_path / "rows.json"):
        [host] = row["hosts"]
        assert row["oversubscribed"] == {"host": host, "ranks": 2, "cores": 1}


@pytest.mark.mpi
def test_ratios_are_those_of_the_same_run(measured):
    rows = {(row["name"], row["bytes"]): row for row in read(measured)}
    for (_, nbytes), row in rows.items():
        mpi, copy = rows["MPI", nbytes], rows["copy", nbytes]
        rate = 2 * 2 * nbytes / copy["median_us"]
        assert row["algbw"] == pytest.approx(nbytes / row["median_us"] / 1e3)
        if row["raw"]:
            ratio = mpi["median_us"] / row["median_us"]
            assert row["vs_mpi"] == pytest.approx(ratio)
    zero_copy = rows["zero-copy", nbytes]
    assert zero_copy["busbw"] == pytest.approx(zero_copy["algbw"])  # 2 (n - 1) / n
    assert zero_copy["floor_us"] == pytest.approx(3 * nbytes / rate)


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
def test_wire_on_nodes_of_one_host_has_no_bytes(bench, tmp_path):
    nodes = "import os; os.environ['MPIR_CVAR_NOLOCAL'] = '1'"
    shown = bench(3, "wire", *QUICK, "--json", "rows.json", before=nodes, status=None)
    if "on one node" in shown:
        pytest.skip("only MPICH makes several nodes of one host")

    assert "no bytes: the nodes of ranks 0-1 are one host, " in shown
    assert max(map(len, shown.splitlines()[2:])) <= 80
    found = read(tmp_path / "rows.json")
    names = ["cross-shard", "sync-replicas", "drop-stale"]
    names += ["sync, sharded", "drop, sharded", "sync, half", "fragments"]
    names += ["fragm., half", "MPI", "exchange"]
    assert [row["name"] for row in found] == names * 2
    for row in found:
        assert row["links"].startswith("no bytes: ")
        assert set(row["figures"]) == {
            "bytes that must cross a link",
            "times the time of cross-shard",
        }
        assert row["vs_floor"] > 0
    floors = *[4 / 3] * 5, 2 / 3, 4 / 3, 2 / 3, 4 / 3, 1
    needed = [row["figures"]["bytes that must cross a link"] for row in found[:10]]
    assert needed == [pytest.approx(floor) for floor in floors]


@pytest.mark.mpi
def test_between_nodes_the_floor_is_that_of_a_link(bench, tmp_path):
    nodes = "import os; os.environ['MPIR_CVAR_NOLOCAL'] = '1'"
    shown = bench(2, "step", *QUICK, "--json", "rows.json", before=nodes)
    if "2 nodes" not in shown:
        pytest.skip("only MPICH makes several nodes of one host")

    assert "floor: times slower than a link allows" in shown
    rows = {(row["name"], row["bytes"]): row for row in read(tmp_path / "rows.json")}
    for nbytes in (4096, 65536):
        exchange = rows["exchange", nbytes]["median_us"]  # 2 (N - 1) / N = 1
        assert rows["step", nbytes]["floor_us"] == pytest.approx(exchange)


@pytest.mark.mpi
def test_a_wrong_answer_ends_the_job(bench):
    plant = """
from hpcaccum import ConditionalAccumulator
take = ConditionalAccumulator.take_grad
ConditionalAccumulator.take_grad = lambda *args, **options: take(*args, **options) + 1
"""
    shown = bench(2, "accumulate", *QUICK, before=plant, status=1)

    assert "accumulate 4 KiB, round: 1024 of 1024 elements are wrong" in shown


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("module", "options", "cure"),
    [
        ("torch", ["--against", "gloo"], "pip install torch"),
        ("matplotlib", ["--plot", "x.png"], "pip install matplotlib"),
    ],
)
def test_missing_packages_are_named_with_the_cure(module, options, cure, bench):
    hide = f"sys.modules[{module!r}] = None"
    shown = bench(2, "allreduce", *options, before=hide, status=2)

    assert shown.count(cure) == 1
    assert "Traceback" not in shown


def test_a_benchmark_of_pytorch_needs_it(bench):
    shown = bench(2, "torch", before="sys.modules['torch'] = None", status=2)

    assert shown.count("bench torch needs PyTorch") == 1
    assert "Traceback" not in shown


# Stands for torch, which few environments of these tests have.
TORCH = """
import types
import mpi4py.MPI as MPI
distributed = types.ModuleType("torch.distributed")
def init(backend, init_method, rank, world_size):
    assert (backend, rank, world_size) == ("gloo", MPI.COMM_WORLD.rank, 2)
    assert len(set(MPI.COMM_WORLD.allgather(init_method))) == 1
    assert init_method.startswith("tcp://127.0.0.1:")
distributed.init_process_group = init
distributed.all_reduce = lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
distributed.destroy_process_group = lambda: None
torch = types.ModuleType("torch")
torch.distributed, torch.from_numpy = distributed, lambda array: array
torch.set_num_threads = lambda number: None
sys.modules.update({"torch": torch, "torch.distributed": distributed})
"""


@pytest.mark.mpi
def test_against_gloo(bench, tmp_path):
    options = "--against", "gloo", "--json", "rows.json"
    bench(2, "allreduce", *QUICK, *options, before=TORCH)

    found = [row for row in read(tmp_path / "rows.json") if row["name"] == "gloo"]
    assert [row["bytes"] for row in found] == [4096, 65536]
    assert all(row["reference"] for row in found)


def rows(**changes):
    """A file of two rows, one of them MPI's."""
    facts = {
        "ranks": 2,
        "nodes": 1,
        "mpi": "MPICH",
        "benchmark": "allreduce",
        "bytes": 4096,
        "samples": 9,
        **dict.fromkeys((*TIMES, "p99_us"), 10.0),
        **dict.fromkeys(("algbw", "busbw", "floor_us", "vs_floor", "vs_mpi")),
        "figures": {},
        "spread_us": 0.0,
    }
    for name, raw in ("ours", "MPI"), ("MPI", None):
        yield {**facts, "name": name, "raw": raw, "reference": not raw, **changes}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_compare_ends_with_1_if_something_is_slower(compare, tmp_path):
    ours, mpi = rows()
    write(tmp_path / "old.json", [ours, mpi])
    write(tmp_path / "slow.json", [{**ours, "median_us": 11.1}, mpi])
    found = compare(
        ("old.json", "slow.json"),
        ("old.json", "slow.json", "--tolerance", "0.2"),
    )

    assert [status for status, _ in found] == [1, 0]
    assert "1 slower by more than 10%" in found[0][1]


UNUSABLE = {
    "no.json": (None, "No such file"),
    "empty.json": (b"", "empty"),
    "picture.json": (b"\x89PNG", "not a text file"),
    "object.json": (b"{}\n", "line 1 is not what hpcaccum bench --json writes"),
    "list.json": (b"[1]\n", "line 1 is not what"),
    "brace.json": (b"{", "line 1 is not what"),
}


def test_compare_ends_with_2_for_unusable_files(compare, tmp_path):
    write(tmp_path / "good.json", rows())
    for name, (content, _) in UNUSABLE.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    pairs = [(name, "good.json") for name in UNUSABLE]
    pairs += [(good, bad) for bad, good in pairs]

    for files, (status, shown) in zip(pairs, compare(*pairs), strict=True):
        [bad] = set(files) - {"good.json"}
        assert status == 2, (files, shown)
        assert f"error: {bad}: {UNUSABLE[bad][1]}" in shown
        assert len(shown.splitlines()) == 1


def test_compare_ends_with_2_if_nothing_is_in_common(compare, tmp_path):
    write(tmp_path / "a.json", rows())
    write(tmp_path / "b.json", rows(ranks=4))
    [(status, shown)] = compare(("a.json", "b.json"))

    assert status == 2, shown
    assert "in common" in shown


def test_compare_reads_what_bench_writes(measured, compare, tmp_path):
    (tmp_path / "other.json").write_bytes(measured.read_bytes())
    [(status, shown)] = compare((measured, "other.json"))

    assert status in (0, 2), shown  # 2 if the times vary too much
    assert "12 rows compared, 0 slower" in shown


def shown_help(benchmark, directory):
    """Return what ``--help`` shows, where there is no MPI, with single spaces."""
    program = f"import hpcaccum.cli as c; c.main(['bench', {benchmark!r}, '--help'])"
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.modules['mpi4py']=None;{program}",
    ]
    env = {"PYTHONPATH": str(REPOSITORY)}
    result = run_program(command, timeout=200, cwd=directory, env=env)
    assert result.returncode == 0, result.stdout
    return " ".join(result.stdout.split())


def test_help_says_what_the_rows_are(tmp_path):
    shown = shown_help("allreduce", tmp_path)

    assert "- zero-copy: in place in the reducer's arrays." in shown
    assert "Args:" not in shown


def test_help_has_the_defaults_of_its_benchmark(tmp_path):
    wire, several = (shown_help(name, tmp_path) for name in ("wire", "all"))

    assert "has all powers of two (4K,1M,16M) --seconds" in wire
    assert "seconds for each size (2); at least three runs" in wire
    assert "has all powers of two (4K:256M) --seconds" in several
    assert f"one after the other: {', '.join(BENCHMARKS)}" in several

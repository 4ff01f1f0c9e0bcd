"""``hpcaccum bench device`` computes what it should before it measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cupy
import pytest

from hpcaccum import group_of
from hpcaccum.bench.device import DEVICE_BENCHMARKS
from hpcaccum.bench.measure import measure, rows
from hpcaccum.device import kernels

from ..common import json_lines
from ..programs import run_program
from ..system.conftest import REPOSITORY
from ..unit.measured import check_rows

pytestmark = pytest.mark.slow

SECONDS = 1e-3
# Where the cupy of this process is from: the simulator, if it is.
CUPY = str(Path(cupy.__file__).parents[1])


@pytest.fixture
def make():
    """Make cases, and free them."""
    made = []

    def case(name, nbytes=4096):
        made.append(DEVICE_BENCHMARKS[name](group_of(), nbytes))
        return made[-1]

    yield case
    for each in made:
        each.free()


@pytest.mark.parametrize("nbytes", [128, 4096, 65536 + 128])
@pytest.mark.parametrize("name", DEVICE_BENCHMARKS)
def test_every_kind_is_verified_and_timed(name, nbytes, make):
    case = make(name, nbytes)
    found = rows(name, case, measure(case, name, SECONDS))

    check_rows(found)
    for row in found:
        if name != "device exchange":
            assert row.busbw > 0
            assert row.vs_floor > 0


PLANTED = [
    ("device sums", "add f32", "accumulate_f32"),
    ("device sums", "add f16", "accumulate_f16"),
    ("device sums", "mean", "mean_f32"),
    ("device sums", "clip", "square_norm_f32"),
    ("device sums", "clip", "mean_clip_f32"),
    ("device arrays", "add", "multi_accumulate_f32"),
    ("device arrays", "pack", "pack_f32"),
    ("device arrays", "unpack", "unpack_f32"),
    ("device rows", "scatter", "scatter_add_rows_f32"),
    ("device rows", "mean rows", "mean_rows_f32"),
    ("device rounds", "apply", "accumulate_f32"),
    ("device rounds", "apply 161", "multi_accumulate_f32"),
    ("device exchange", "exchange", "unpack_f32"),
]


@pytest.mark.parametrize(("name", "kind", "kernel"), PLANTED)
def test_a_kernel_that_does_nothing_is_found_before_anything_is_timed(
    name, kind, kernel, make, monkeypatch
):
    case = make(name)
    case.kinds = [each for each in case.kinds if each.name == kind]
    good = kernels.kernel
    prepare, armed = case.forget, []

    def spoil():
        prepare()
        armed.append(True)

    def planted(which):
        if armed and which == kernel:
            return lambda grid, block, args: None
        return good(which)

    case.forget = spoil
    monkeypatch.setattr(kernels, "kernel", planted)
    with pytest.raises(RuntimeError, match=f"bench, {kind}: .*wrong|for 1 gradients"):
        measure(case, "bench", SECONDS)


@pytest.fixture
def bench(tmp_path):
    """Run ``hpcaccum bench device``, in an empty directory."""

    def run(*options, status=0, **environment):
        command = [sys.executable, "-m", "hpcaccum", "bench", "device", *options]
        path = {"PYTHONPATH": os.pathsep.join([CUPY, str(REPOSITORY)])}
        env = os.environ | path | environment
        result = run_program(command, timeout=120, cwd=tmp_path, env=env)
        assert result.returncode == status, result.stdout
        return result.stdout

    return run


def test_table_and_json(bench, tmp_path):
    sizes = "--sizes", "4K", "8K", "--seconds", "0.01"
    shown = bench(*sizes, "--json", "rows.json")

    lines = shown.splitlines()
    assert lines[0].startswith("1 rank on ")
    assert f"CuPy {cupy.__version__}; 20" in lines[2]
    assert max(map(len, lines[3:])) <= 80
    found = json_lines(tmp_path / "rows.json")
    assert {row["benchmark"] for row in found} == {*DEVICE_BENCHMARKS}
    for row in found:
        for fact in "date", "device", "driver", "cupy", "device_memory", "cpu":
            assert row[fact]
        assert row["name"] in shown
        assert f"\n\n{row['benchmark']}\n" in shown
    by_name = {(r["benchmark"], r["name"], r["bytes"]): r for r in found}
    add, copy = (by_name["device sums", name, 8192] for name in ("add f32", "copy"))
    assert add["busbw"] == pytest.approx(3 * 8192 / add["median_us"] / 1e3)
    assert add["floor_us"] == pytest.approx(1.5 * copy["median_us"])


def test_a_size_that_does_not_fit_is_skipped(bench):
    shown = bench("--sizes", "4096G", "--seconds", "0.01")

    assert shown.count("4096 GiB skipped: needs ") == len(DEVICE_BENCHMARKS)
    assert "GiB of the device, " in shown


def test_without_a_device_it_ends_with_1_and_says_so(bench):
    nothing = {"CUPY_SIMULATOR_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}
    shown = bench("--sizes", "4K", status=1, **nothing)

    assert shown.startswith("hpcaccum bench: error: CuPy ")
    assert "finds no CUDA device" in shown
    assert "Traceback" not in shown

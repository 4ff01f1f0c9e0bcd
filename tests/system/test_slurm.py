"""The batch scripts of slurm/, submitted to a SLURM that lives as long as this file.

Where none can be started these tests are skipped, unless HPCACCUM_REQUIRE_SLURM=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Cluster, cluster, obstacle

from .conftest import REPOSITORY

pytestmark = pytest.mark.mpi

# Seconds; a job here takes 1 to 8.
WAIT = 300
QUICK = {
    "bench-array.sbatch": ("--sizes", "4K", "--seconds", "0.2"),
    "train-multi-node.sbatch": ("--epochs", "1"),
    "train-one-node.sbatch": ("--epochs", "1"),
}
# What a launcher around these tests may have left in their environment.
FOREIGN = ("SLURM_", "SBATCH_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = obstacle()
    if reason and os.environ.get("HPCACCUM_REQUIRE_SLURM") == "1":
        pytest.fail(f"HPCACCUM_REQUIRE_SLURM=1, but a SLURM cluster {reason}")
    if reason:
        pytest.skip(f"a SLURM cluster {reason}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def mpi(slurm: Cluster) -> str:
    """What srun calls the way in which this environment's MPI starts."""
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    command = [sys.executable, "-c", f"{program}; print(MPI.get_vendor()[0])"]
    vendor = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return "pmix" if vendor.strip() == "Open MPI" else "pmi2"


class Submit:
    """Submit a script of slurm/ and wait for the job."""

    def __init__(self, slurm: Cluster, env: dict[str, str], directory: Path):
        self.slurm = slurm
        self.env = env
        self.directory = directory

    def __call__(self, script: str, *options: str, **env: str) -> tuple[str, list[str]]:
        """Return the number of the job and how it, or each task of it, ended."""
        path = REPOSITORY / "slurm" / script
        job = self.slurm.submit(
            *options, path, *QUICK[script], cwd=self.directory, env=self.env | env
        )
        try:
            return job, self.slurm.wait(job, timeout=WAIT)
        except TimeoutError as error:
            self.slurm.call("scancel", job)
            pytest.fail(f"{error}\n{self.outputs()}")

    def outputs(self) -> str:
        """What all jobs of this test have written."""
        files = sorted(self.directory.glob("*.out"))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in files)

    def log(self, name: str) -> tuple[dict, dict]:
        """The first and the last line of a log, or of what was measured."""
        lines = (self.directory / name).read_text().splitlines()
        return json.loads(lines[0]), json.loads(lines[-1])


@pytest.fixture
def submit(slurm: Cluster, mpi_environment: dict[str, str], tmp_path: Path) -> Submit:
    clean = {k: v for k, v in mpi_environment.items() if not k.startswith(FOREIGN)}
    bin_directory = str(Path(sys.executable).parent)
    paths = {
        "PATH": os.pathsep.join([bin_directory, os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
    }
    return Submit(slurm, clean | paths, tmp_path)


def test_one_node(submit: Submit):
    job, states = submit(
        "train-one-node.sbatch", "--ntasks-per-node=2", "--cpus-per-task=2"
    )

    assert states == ["COMPLETED"], submit.outputs()
    names = {path.name for path in submit.directory.iterdir()}
    assert names == {f"hpcaccum-train-{job}{end}" for end in (".out", ".jsonl", ".png")}
    start, result = submit.log(f"hpcaccum-train-{job}.jsonl")
    assert (start["ranks"], start["threads"]) == (2, "2")
    assert len(result["accepted"]) == 2
    assert "test accuracy" in submit.outputs()


def test_two_nodes(submit: Submit):
    job, states = submit("train-multi-node.sbatch", "--ntasks-per-node=2")

    assert states == ["COMPLETED"], submit.outputs()
    start, result = submit.log(f"hpcaccum-train-{job}.jsonl")
    assert start["hosts"] == {"n1": 2, "n2": 2}
    assert len(result["accepted"]) == 4


def test_array(submit: Submit):
    options = ("--array=1,4", "--nodes=2", "--ntasks-per-node=1")
    job, states = submit("bench-array.sbatch", *options)

    assert states == ["COMPLETED", "COMPLETED"], submit.outputs()
    for task, benchmark, name in (1, "allreduce", "zero-copy"), (4, "progress", "Put"):
        table = (submit.directory / f"hpcaccum-bench-{job}_{task}.out").read_text()
        first, last = submit.log(f"hpcaccum-bench-{job}-{benchmark}.jsonl")
        assert first["benchmark"] == last["benchmark"] == benchmark
        assert first["hosts"] == {"n1": 1, "n2": 1}
        assert f"4 KiB {first['name']}" in table
        assert name in table


def test_ranks_that_do_not_find_each_other_are_an_error(submit: Submit, mpi: str):
    _, states = submit(
        "train-one-node.sbatch", "--ntasks-per-node=2", SLURM_MPI_TYPE="none"
    )

    assert states == ["FAILED"], submit.outputs()
    assert f"srun --mpi={mpi}" in submit.outputs()
    assert not list(submit.directory.glob("*.jsonl"))

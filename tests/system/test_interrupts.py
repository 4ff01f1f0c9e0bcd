"""Ctrl-C: SIGINT comes to all ranks of a job, or to one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from .conftest import REPOSITORY

pytestmark = pytest.mark.mpi

COMMAND = """
import os, pathlib, sys
from hpcaccum.mpi import MPI
from hpcaccum.train.model import MLP
compute, looks = MLP.loss_and_gradients, []
def computed(*args):
    looks.append(None)
    if len(looks) == 20:
        name = f"{MPI.COMM_WORLD.rank}.part"
        pathlib.Path(name).write_text(str(os.getpid()))
        pathlib.Path(name).rename(f"{MPI.COMM_WORLD.rank}.pid")
    return compute(*args)
MLP.loss_and_gradients = computed
from hpcaccum.cli import main
sys.exit(main(["train", *sys.argv[1:], "--epochs", "1000000"]))
"""
LIBRARY = """
import os, pathlib, time
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
with hpc.Reducer(hpc.Layout({"x": (100,)}, "float32")) as reducer:
    reducer.reduce()
    pathlib.Path(f"{rank}.part").write_text(str(os.getpid()))
    pathlib.Path(f"{rank}.part").rename(f"{rank}.pid")
    time.sleep(60)
"""


@pytest.fixture
def interrupted(mpiexec, mpi_environment, tmp_path):
    """Run a script on some ranks, interrupt some of them; return what it wrote."""

    def run(ranks, text, *words, only=None):
        script = tmp_path / "script.py"
        script.write_text(text)
        launcher = [mpiexec, "-n", str(ranks)] if ranks else []
        files = [tmp_path / f"{rank}.pid" for rank in range(ranks or 1)]
        with subprocess.Popen(
            [*launcher, sys.executable, str(script), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=mpi_environment | {"PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
        ) as process:
            limit = time.monotonic() + 40
            while not all(file.exists() for file in files):
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < limit
                time.sleep(0.01)
            for rank, file in enumerate(files):
                if only in (None, rank):
                    os.kill(int(file.read_text()), signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=150)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return output, process.returncode

    return run


@pytest.mark.parametrize("strategy", ["cross-shard", "drop-stale"])
def test_an_interrupted_command_is_one_line(interrupted, samples, strategy):
    words = "--strategy", strategy, "--data", samples
    output, status = interrupted(3, COMMAND, *words)

    assert output.count("interrupted") == 1, output
    assert "hpcaccum: interrupted\n" in output
    assert "Traceback" not in output
    assert status != 0


def test_an_interrupted_command_without_a_launcher_has_status_130(interrupted, samples):
    words = "--strategy", "cross-shard", "--data", samples
    output, status = interrupted(0, COMMAND, *words)

    assert output.splitlines()[-1] == "hpcaccum: interrupted"
    assert "Traceback" not in output
    assert status == 130


def test_a_rank_that_is_interrupted_alone_ends_the_job(interrupted, samples):
    words = "--strategy", "drop-stale", "--data", samples
    output, status = interrupted(2, COMMAND, *words, only=1)

    assert "rank 1: hpcaccum: interrupted\n" in output
    assert "Traceback" not in output
    assert status != 0


def test_an_interrupted_program_is_a_line_a_rank_at_most(interrupted):
    output, status = interrupted(2, LIBRARY)

    lines = [line for line in output.splitlines() if "KeyboardInterrupt" in line]
    assert 1 <= len(lines) <= 2, output
    assert all("of 2 failed, ending the job: Key" in line for line in lines)
    assert "Traceback" not in output
    assert status != 0

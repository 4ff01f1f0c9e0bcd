"""Ctrl-C: SIGINT comes to all ranks of a job, or to one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from ..common import WAIT
from ..programs import start_program

pytestmark = pytest.mark.mpi

COMMAND = """
import os, pathlib, sys
from hpcaccum.mpi import MPI
from hpcaccum.train.model import MLP
compute, looks = MLP.loss_and_gradients, []
def computed(*args):
    looks.append(None)
    if len(looks) == int(sys.argv[1]):
        name = f"{MPI.COMM_WORLD.rank}.part"
        pathlib.Path(name).write_text(str(os.getpid()))
        pathlib.Path(name).rename(f"{MPI.COMM_WORLD.rank}.pid")
    return compute(*args)
MLP.loss_and_gradients = computed
from hpcaccum.cli import main
sys.exit(main(["train", *sys.argv[2:], "--epochs", "1000000"]))
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
    time.sleep(1000)
"""


@pytest.fixture
def interrupted(mpiexec, mpi_environment, script, tmp_path):
    """Run a script on some ranks, interrupt some of them; return what it wrote."""

    def run(ranks, text, *words, only=None, times=1):
        launcher = [mpiexec, "-n", str(ranks)] if ranks else []
        files = [tmp_path / f"{rank}.pid" for rank in range(ranks or 1)]
        command = [*launcher, sys.executable, script(text), *words]
        with start_program(command, cwd=tmp_path, env=mpi_environment) as process:
            limit = time.monotonic() + WAIT
            while not all(file.exists() for file in files):
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < limit
                time.sleep(0.01)
            for _ in range(times):
                for rank, file in enumerate(files):
                    if only in (None, rank):
                        os.kill(int(file.read_text()), signal.SIGINT)
                time.sleep(0.3)
            try:
                output, _ = process.communicate(timeout=WAIT)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return output, process.returncode

    return run


@pytest.mark.parametrize("strategy", ["cross-shard", "drop-stale"])
@pytest.mark.parametrize("only", [None, 1])
def test_an_interrupted_command_ends_in_order(interrupted, samples, strategy, only):
    words = "20", "--strategy", strategy, "--data", samples
    output, status = interrupted(3, COMMAND, *words, only=only)

    assert output.count("interrupted: training ends here; Ctrl-C again") == 1
    assert re.search(r"^update \d+, from the start; stopped before", output, re.M)
    assert "accepted and dropped" in output
    assert "Traceback" not in output
    assert status == 130


def test_an_interrupted_comparison_shows_what_it_has(interrupted, samples, tmp_path):
    words = "20", "--compare", "--data", samples
    output, status = interrupted(2, COMMAND, *words)

    assert "stopped before" in output
    assert "sync-replicas" not in output
    assert (tmp_path / "hpcaccum-compare.png").stat().st_size > 1000
    assert status == 130


@pytest.mark.parametrize(("ranks", "only"), [(3, None), (2, 1), (0, None)])
def test_a_second_interrupt_ends_the_job_at_once(interrupted, samples, ranks, only):
    # A gradient that takes longer than this test may.
    slow = [
        word for rank in range(ranks or 1) for word in ("--straggler", f"{rank}:4e5")
    ]
    words = "1", "--strategy", "drop-stale", "--data", samples, *slow
    output, status = interrupted(ranks, COMMAND, *words, only=only, times=2)

    prefix = f"rank {only}: " if only else ""
    assert f"{prefix}hpcaccum: interrupted\n" in output
    assert output.count("interrupted\n") == 1
    assert "Traceback" not in output
    assert status == 130 if ranks == 0 else status != 0


def test_an_interrupted_program_is_a_line_a_rank_at_most(interrupted):
    output, status = interrupted(2, LIBRARY)

    lines = [line for line in output.splitlines() if "KeyboardInterrupt" in line]
    assert 1 <= len(lines) <= 2, output
    assert all("of 2 failed, ending the job: Key" in line for line in lines)
    assert "Traceback" not in output
    assert status != 0

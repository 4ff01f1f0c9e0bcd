"""What a rank starts or forks fails by itself, and the job of the rank goes on."""

from __future__ import annotations

import sys

import pytest

# Multiprocessing imports the main program again, in a process that it spawns.
STARTS = """
import multiprocessing, os, subprocess, sys

FAILS = "import hpcaccum; raise ValueError('it failed')"

def started():
    for way in "spawn", "forkserver":
        child = multiprocessing.get_context(way).Process(target=print)
        child.start()
        yield way, child
    line = f'{{sys.executable}} -c "{{FAILS}}"'
    # The parent of the last one has ended before.
    lines = f"{{line}}; exit $?", f"(sleep 1; {{line}}; echo status $?) & exit 7"
    words = [sys.executable, "-m", "hpcaccum", "bench", "compare", "none", "none"]
    for command in words, *lines:
        yield command, subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, shell=isinstance(command, str)
        )

def ended(child):
    if isinstance(child, subprocess.Popen):
        output, _ = child.communicate()
        return child.returncode, output
    child.join()
    return child.exitcode

if __name__ != "__main__":
    exec(FAILS)
{before}
found = []
if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    found = [ended(child) for _, child in list(started())]
    assert found == [1, 1, (2, ""), (1, ""), (7, "status 1\\n")], found
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print("the end")
"""

USED = """
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

acc = hpc.ConditionalAccumulator("float32", (2,))
w = hpc.Variable(np.zeros(2), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1)
opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
"""

FORKS = """
import multiprocessing, os, sys
{before}

def fail():
    raise ValueError("it failed")

def leave():
    sys.exit(3)

if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    for act, status in (fail, 1), (leave, 3), (dict, 0):
        child = multiprocessing.get_context("fork").Process(target=act)
        child.start()
        child.join()
        assert child.exitcode == status
    if not (child := os.fork()):
        fail()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    # As at the end of its program, up to MPI_Finalize.
    if not (child := os.fork()):
        import atexit
        atexit._run_exitfuncs()
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print("the end")
"""


@pytest.mark.parametrize(
    ("program", "before"),
    [
        # Nothing of hpcaccum is there when a child starts.
        (STARTS, "from mpi4py import MPI"),
        (STARTS, USED),
        (FORKS, "import hpcaccum"),
        (FORKS, USED),
    ],
    ids=["mpi4py", "used", "forked", "used and forked"],
)
def test_a_child_that_fails_leaves_the_job_alone(
    mpirun, script, tmp_path, program, before
):
    path = script(program.format(before=before))
    done = mpirun(2, path, cwd=tmp_path, timeout=60, status=0)

    assert done.stdout.count("the end") == 2
    assert "ending the job" not in done.stdout


@pytest.mark.parametrize("first", [[], ["sh", "-c", '"$@"; exit $?', "sh"]])
def test_a_rank_that_fails_before_mpi_ends_the_job(mpirun, script, first):
    program = """
import os, sys
import mpi4py
mpi4py.rc.initialize = False
import hpcaccum
from mpi4py import MPI
if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    raise ValueError("it failed")
MPI.Init()
MPI.COMM_WORLD.Barrier()
"""
    words = [*first, sys.executable, str(script(program))]
    done = mpirun(2, *words[1:], program=words[0], timeout=60)

    assert done.returncode != 0
    assert "ValueError: it failed" in done.stdout

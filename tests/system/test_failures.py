"""A rank that fails ends the job; windows that are left open are freed."""

from __future__ import annotations

import re

import pytest

RAISES = """
import contextlib
import hpcaccum as hpc
from mpi4py import MPI

with {block}:
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("it has had enough")
    {wait}
"""
WAITS = "hpc.ConditionalAccumulator('f4', (2,)).take_grad(MPI.COMM_WORLD.size)"

RAISES_BEFORE_MPI = """
import os
import hpcaccum as hpc

rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    raise ValueError("it has had enough")
hpc.ConditionalAccumulator("float32", (2,))
"""

RAISES_IN_THE_SERVER = """
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

class Broken(hpc.SGD):
    def apply_gradients(self, *args, **kwargs):
        raise ValueError("it has had enough")

w = hpc.Variable(np.zeros(2), "w")
opt = hpc.DropStaleGradientOptimizer(Broken(1.0), staleness=9)
opt.initialize([w])
opt.minimize(lambda: (0.0, [np.ones(2)]))
"""

RAISES_ON_ALL = """
import hpcaccum as hpc
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
hpc.ConditionalAccumulator("float32", {shape})
"""

CATCHES_AND_WAITS = """
import hpcaccum as hpc
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
try:
    hpc.ConditionalAccumulator("float32", (-1,) if rank == 1 else (2,))
except hpc.InvalidArgumentError:
    if rank != 1:
        raise
MPI.COMM_WORLD.Barrier()
"""

# As if MPI could not connect rank 1 to the others.
UNREACHED = """
import time
import hpcaccum as hpc
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    hpc.Group.__init__ = lambda *_: time.sleep(60)
hpc.ConditionalAccumulator("float32", (2,))
"""

LEAVES_WINDOWS_OPEN = """
import numpy as np
import hpcaccum as hpc

acc = hpc.ConditionalAccumulator("float32", (2,))
acc.apply_grad([1, 2])
w = hpc.Variable(np.zeros(2), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1)
opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
other = hpc.CrossShardOptimizer(hpc.SGD(1.0))
other.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
{end}
print("the end")
"""

HOST_ENDS_FIRST = """
import numpy as np
import hpcaccum as hpc
from hpcaccum import summation
from tests import internals
from hpcaccum.mpi import Group
from mpi4py import MPI

# Sums that are short, on a machine of two cores, use threads all the same.
summation._SHARED = summation._SHARE = 1000
Group._share_cores = lambda self: 3
w = hpc.Variable(np.zeros(9000), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1)
opt.initialize([w])
{before}
if MPI.COMM_WORLD.rank == 1:
    # Wait until the host has left: its interpreter is ending.
    while 0 not in internals.left(opt):
        pass
    for _ in range(5):
        opt.minimize(lambda: (0.0, [np.ones(9000)]))
    print("trained", opt.global_step >= 5)
"""

EXITS = """
import sys
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

w = hpc.Variable(np.zeros(2), "w")
with hpc.CrossShardOptimizer(hpc.SGD(1.0)) as opt:
    for step in range(3):
        opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
        if step == 1 and MPI.COMM_WORLD.rank in {ranks}:
            sys.exit(3)
"""

WAITS_TOO_LONG = """
import hpcaccum as hpc
from mpi4py import MPI

acc = hpc.ConditionalAccumulator("float32", (2,), name="w")
if MPI.COMM_WORLD.rank == 0:
    acc.apply_grad([1, 2])
    acc.take_grad(MPI.COMM_WORLD.size)
else:
    MPI.COMM_WORLD.recv(source=0)
"""


TOO_FEW_COMMUNICATORS = """
import sys
from mpi4py import MPI
import hpcaccum as hpc

comm, taken = MPI.COMM_WORLD, []
with hpc.ConditionalAccumulator("f4", (4,)):
    try:
        while len(taken) < 2100:
            taken.append(comm.Dup())
    except MPI.Exception:
        try:
            # Words on another rank than those of the first one need a window.
            hpc.ConditionalAccumulator("f4", (4,), host=1)
        except RuntimeError as error:
            assert "1 objects of hpcaccum are open" in str(error), error
    for each in taken:
        each.Free()
    hpc.ConditionalAccumulator("f4", (4,)).free()
sys.stdout.write("went on\\n")
"""


def test_objects_without_a_communicator_are_refused_on_every_rank(mpirun, script):
    result = mpirun(2, script(TOO_FEW_COMMUNICATORS), env={"MPIR_CVAR_NOLOCAL": "0"})

    assert result.returncode == 0, result.stdout
    assert result.stdout.count("went on") == 2


ACCUMULATOR = "hpc.ConditionalAccumulator('f4', (2,)) as acc"


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (3, RAISES.format(block="contextlib.nullcontext()", wait=WAITS)),
        (3, RAISES.format(block=ACCUMULATOR, wait="acc.take_grad(3)")),
        (3, RAISES.format(block="hpc.trace('trace.json')", wait="pass")),
        (3, RAISES_BEFORE_MPI),
        (3, RAISES_IN_THE_SERVER),
        (1, RAISES_IN_THE_SERVER),
    ],
    ids=["waiting", "with", "trace", "before MPI", "server", "server, alone"],
)
def test_exception_on_one_rank_ends_the_job(mpirun, script, ranks, program, tmp_path):
    result = mpirun(ranks, script(program), cwd=tmp_path)

    assert result.returncode != 0
    assert "ValueError: it has had enough" in result.stdout
    if "nullcontext" in program:
        assert "rank 1 of 3 failed, ending the job:\nTraceback" in result.stdout


@pytest.mark.parametrize(("ranks", "status"), [("[0, 1]", 3), ("[1]", 1)])
def test_a_status_is_that_of_the_program_if_all_ranks_exit(
    mpirun, script, ranks, status, tmp_path
):
    result = mpirun(2, script(EXITS.format(ranks=ranks)), cwd=tmp_path)
    assert result.returncode == status
    assert ("ranks make different calls" in result.stdout) == (status == 1)


@pytest.mark.parametrize(
    ("shape", "rank"), [("(-1,)", 0), ("(-1,) if rank == 1 else (2,)", 1)]
)
def test_an_error_of_all_ranks_is_printed_once(mpirun, script, shape, rank):
    result = mpirun(3, script(RAISES_ON_ALL.format(shape=shape)))

    assert result.returncode != 0
    assert result.stdout.count("Traceback") == 1, result.stdout
    assert f"rank {rank} of 3 failed, ending the job:\nTraceback" in result.stdout
    assert "InvalidArgumentError" in result.stdout


def test_other_ranks_print_an_error_that_one_rank_catches(mpirun, script):
    result = mpirun(3, script(CATCHES_AND_WAITS))

    assert result.returncode != 0
    assert "rank 1 of 3 failed" not in result.stdout
    assert "InvalidArgumentError" in result.stdout
    assert "got (-1,)" in result.stdout


@pytest.mark.parametrize("end", ["", "from mpi4py import MPI; MPI.Finalize()"])
@pytest.mark.parametrize(("ranks", "apart"), [(1, "0"), (3, "0"), (3, "1")])
def test_windows_left_open_do_not_hang_the_end(mpirun, script, ranks, apart, end):
    program = LEAVES_WINDOWS_OPEN.format(end=end)
    # With MPICH each rank may be a node, which has an agent.
    result = mpirun(ranks, script(program), env={"MPIR_CVAR_NOLOCAL": apart})

    assert result.returncode == 0, result.stdout
    assert result.stdout.count("the end") == ranks
    assert "Error" not in result.stdout


@pytest.mark.parametrize(
    "before", ["", "opt.minimize(lambda: (0.0, [np.ones(9000)]))"], ids=["new", "used"]
)
def test_a_host_whose_script_ends_serves_until_the_others_do(mpirun, script, before):
    program = HOST_ENDS_FIRST.format(before=before)
    result = mpirun(2, script(program))

    assert result.returncode == 0, result.stdout
    assert result.stdout == "trained True\n"


def test_limit_of_the_environment_ends_a_wait_and_says_for_whom(mpirun, script):
    # Long enough for the calls before it, on a machine that is busy.
    env = {"HPCACCUM_TIMEOUT": "3"}
    result = mpirun(3, script(WAITS_TOO_LONG), env=env)

    assert result.returncode != 0
    said = r"w: take_grad\(3\): waited [\d.]+ s for 3 gradients at step 0, had 1"
    assert re.search(said, result.stdout)
    assert "nothing from ranks 1-2" in result.stdout


def test_ranks_that_mpi_does_not_connect_end_at_the_limit(mpirun, script):
    done = mpirun(2, script(UNREACHED), env={"HPCACCUM_TIMEOUT": "1"})

    assert done.returncode != 0
    assert re.search(
        r"rank \d of 2 failed, ending the job: first use of a communicator: waited \S+ "
        "s for MPI to connect this rank to others: can all nodes reach each other",
        done.stdout,
    ), done.stdout

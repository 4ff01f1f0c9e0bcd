"""A rank that fails ends the job; windows that are left open are freed."""

from __future__ import annotations

import re

import pytest

from .conftest import BEGIN

RAISES = (
    BEGIN
    + """
import contextlib

with {block}:
    if rank == 1:
        raise ValueError("it has had enough")
    {wait}
"""
)
WAITS = "hpc.ConditionalAccumulator('f4', (2,)).take_grad(size)"

RAISES_BEFORE_MPI = """
import os
import hpcaccum as hpc

rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    raise ValueError("it has had enough")
hpc.ConditionalAccumulator("float32", (2,))
"""

RAISES_IN_THE_SERVER = (
    BEGIN
    + """
class Broken(hpc.SGD):
    def apply_gradients(self, *args, **kwargs):
        raise ValueError("it has had enough")

w = hpc.Variable(np.zeros(2), "w")
opt = hpc.DropStaleGradientOptimizer(Broken(1.0), staleness=9)
opt.initialize([w])
opt.minimize(lambda: (0.0, [np.ones(2)]))
"""
)

RAISES_ON_ALL = """
hpc.ConditionalAccumulator("float32", {shape})
"""

CATCHES_AND_WAITS = """
try:
    hpc.ConditionalAccumulator("float32", (-1,) if rank == 1 else (2,))
except hpc.InvalidArgumentError:
    if rank != 1:
        raise
comm.Barrier()
"""

# As if MPI could not connect rank 1 to the others.
UNREACHED = """
if rank == 1:
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
from hpcaccum import summation
from hpcaccum.mpi import Group
from tests import internals

# Sums that are short, on a machine of two cores, use threads all the same.
summation._SHARED = summation._SHARE = 1000
Group._share_cores = lambda self: 3
w = hpc.Variable(np.zeros(9000), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1)
opt.initialize([w])
{before}
if rank == 1:
    # Wait until the host has left: its interpreter is ending.
    while 0 not in internals.left(opt):
        pass
    for _ in range(5):
        opt.minimize(lambda: (0.0, [np.ones(9000)]))
    print("trained", opt.global_step >= 5)
"""

EXITS = """
w = hpc.Variable(np.zeros(2), "w")
with hpc.CrossShardOptimizer(hpc.SGD(1.0)) as opt:
    for step in range(3):
        opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
        if step == 1 and rank in {ranks}:
            sys.exit(3)
"""

WAITS_TOO_LONG = """
acc = hpc.ConditionalAccumulator("float32", (2,), name="w")
if rank == 0:
    acc.apply_grad([1, 2])
    acc.take_grad(size)
else:
    comm.recv(source=0)
"""

TOO_FEW_COMMUNICATORS = """
taken = []
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


def test_objects_without_a_communicator_are_refused_on_every_rank(mpirun, program):
    env = {"MPIR_CVAR_NOLOCAL": "0"}
    result = mpirun(2, program(TOO_FEW_COMMUNICATORS), env=env, status=0)

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
    mpirun, program, ranks, status
):
    result = mpirun(2, program(EXITS.format(ranks=ranks)), status=status)
    assert ("ranks make different calls" in result.stdout) == (status == 1)


@pytest.mark.parametrize(
    ("shape", "rank"), [("(-1,)", 0), ("(-1,) if rank == 1 else (2,)", 1)]
)
def test_an_error_of_all_ranks_is_printed_once(mpirun, program, shape, rank):
    result = mpirun(3, program(RAISES_ON_ALL.format(shape=shape)))

    assert result.returncode != 0
    assert result.stdout.count("Traceback") == 1, result.stdout
    assert f"rank {rank} of 3 failed, ending the job:\nTraceback" in result.stdout
    assert "InvalidArgumentError" in result.stdout


def test_other_ranks_print_an_error_that_one_rank_catches(mpirun, program):
    result = mpirun(3, program(CATCHES_AND_WAITS))

    assert result.returncode != 0
    assert "rank 1 of 3 failed" not in result.stdout
    assert "InvalidArgumentError" in result.stdout
    assert "got (-1,)" in result.stdout


@pytest.mark.parametrize("end", ["", "from mpi4py import MPI; MPI.Finalize()"])
@pytest.mark.parametrize(("ranks", "apart"), [(1, "0"), (3, "0"), (3, "1")])
def test_windows_left_open_do_not_hang_the_end(mpirun, script, ranks, apart, end):
    program = LEAVES_WINDOWS_OPEN.format(end=end)
    # With MPICH each rank may be a node, which has an agent.
    env = {"MPIR_CVAR_NOLOCAL": apart}
    result = mpirun(ranks, script(program), env=env, status=0)

    assert result.stdout.count("the end") == ranks
    assert "Error" not in result.stdout


@pytest.mark.parametrize(
    "before", ["", "opt.minimize(lambda: (0.0, [np.ones(9000)]))"], ids=["new", "used"]
)
def test_a_host_whose_script_ends_serves_until_the_others_do(mpirun, program, before):
    result = mpirun(2, program(HOST_ENDS_FIRST.format(before=before)), status=0)

    assert result.stdout == "trained True\n"


def test_limit_of_the_environment_ends_a_wait_and_says_for_whom(mpirun, program):
    # Long enough for the calls before it, on a machine that is busy.
    env = {"HPCACCUM_TIMEOUT": "3"}
    result = mpirun(3, program(WAITS_TOO_LONG), env=env)

    assert result.returncode != 0
    said = r"w: take_grad\(3\): waited [\d.]+ s for 3 gradients at step 0, had 1"
    assert re.search(said, result.stdout)
    assert "nothing from ranks 1-2" in result.stdout


def test_ranks_that_mpi_does_not_connect_end_at_the_limit(mpirun, program):
    done = mpirun(2, program(UNREACHED), env={"HPCACCUM_TIMEOUT": "1"})

    assert done.returncode != 0
    assert re.search(
        r"rank \d of 2 failed, ending the job: first use of a communicator: waited \S+ "
        "s for MPI to connect this rank to others: can all nodes reach each other",
        done.stdout,
    ), done.stdout

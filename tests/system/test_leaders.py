"""Leaders of nodes whose programs end before those of other ranks."""

from __future__ import annotations

import pytest

# Two nodes are made up, of the even and of the odd ranks.
ENDS_EARLY = """
import sys
import numpy as np
import hpcaccum as hpc
from hpcaccum import Group
from mpi4py import MPI

comm = MPI.COMM_WORLD
group = Group(comm.Dup(), comm.Split(comm.rank % 2, comm.rank))
w = hpc.Variable(np.zeros(1000), "w")
opt = {optimizer}

def step():
    opt.minimize(lambda: (0.0, [np.ones(1000)]), var_list=[w])

step()
if comm.rank == {leader}:
    {end}
for _ in range(20):
    step()
opt.free()
assert (w.value == -opt.global_step).all(), (w.value[0], opt.global_step)
line = f"the end after {{opt.statistics().accepted}}\\n"
print(line, end="", flush=True)
"""
OPTIMIZERS = {
    "sync-replicas": "hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 4, comm=group)",
    "drop-stale": "hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 1000, comm=group)",
}
CROSS_SHARD = "hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=group)"


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_others_train_on_after_the_program_of_a_leader(
    mpirun, script, optimizer, leader
):
    program = ENDS_EARLY.format(
        optimizer=OPTIMIZERS[optimizer], leader=leader, end="sys.exit()"
    )
    result = mpirun(4, script(program))
    accepted = tuple(1 if rank == leader else 21 for rank in range(4))

    assert result.returncode == 0, result.stdout
    assert result.stdout.count(f"the end after {accepted}") == 3, result.stdout
    assert "Error" not in result.stdout


@pytest.mark.parametrize(
    ("optimizer", "end", "message"),
    [
        (CROSS_SHARD, "sys.exit()", "at the end of its program"),
        (OPTIMIZERS["drop-stale"], "raise ValueError('enough')", "ValueError: enough"),
    ],
    ids=["cross-shard", "error"],
)
def test_the_job_ends_if_others_cannot_train_on(
    mpirun, script, optimizer, end, message
):
    program = ENDS_EARLY.format(optimizer=optimizer, leader=1, end=end)
    result = mpirun(4, script(program))

    assert result.returncode
    assert message in result.stdout
    assert "rank 1" in result.stdout
    assert "the end" not in result.stdout.replace(message, "")

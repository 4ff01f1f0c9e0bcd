"""Programs whose ranks are on several nodes, made up or real: how they fail and end."""

from __future__ import annotations

import pytest

AGENT_RAISES = """
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import Agent, NodeParts

# Each rank is on a node of its own.
group = hpc.Group(comm.Dup(), comm.Split(rank, 0))

class Service:
    def handle(self, source):
        {before}
        yield True
        raise ValueError("the agent has had enough")

parts = NodeParts(group, 80, "parts")
number = Agent.of(group).add(Service())
comm.barrier()
if rank == 0:
    Agent.of(group).request(1, number)
    while True:
        places = [(each, 0) for each in range(size)]
        parts.sum(places, 10, np.dtype("f8"), 1, Deadline(None, "sum"))
comm.barrier()
"""


@pytest.mark.parametrize("before", ["pass", "raise ValueError('it has had enough')"])
def test_agent_that_raises_ends_the_job(mpirun, program, before):
    result = mpirun(3, program(AGENT_RAISES.format(before=before)))

    assert result.returncode
    assert result.stdout.count("has had enough") >= 1
    assert "ValueError: " in result.stdout
    assert "in handle" in result.stdout


# The program of a leader ends before those of other ranks. Two nodes are made up.
ENDS_EARLY = """
group = hpc.Group(comm.Dup(), comm.Split(rank % 2, rank))
w = hpc.Variable(np.zeros(1000), "w")
opt = {optimizer}

def step():
    opt.minimize(lambda: (0.0, [np.ones(1000)]), var_list=[w])

step()
if rank == {leader}:
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
    mpirun, program, optimizer, leader
):
    text = ENDS_EARLY.format(
        optimizer=OPTIMIZERS[optimizer], leader=leader, end="sys.exit()"
    )
    result = mpirun(4, program(text), status=0)
    accepted = tuple(1 if rank == leader else 21 for rank in range(4))

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
    mpirun, program, optimizer, end, message
):
    text = ENDS_EARLY.format(optimizer=optimizer, leader=1, end=end)
    result = mpirun(4, program(text))

    assert result.returncode
    assert message in result.stdout
    assert "rank 1" in result.stdout
    assert "the end" not in result.stdout.replace(message, "")

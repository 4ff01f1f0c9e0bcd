"""Programs whose ranks are on several nodes, made up or real: how they fail and end."""

from __future__ import annotations

import pytest

AGENT_RAISES = """
import numpy as np
from hpcaccum import Group
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import Agent, NodeParts
from mpi4py import MPI

comm = MPI.COMM_WORLD
# Each rank is on a node of its own.
group = Group(comm.Dup(), comm.Split(comm.rank, 0))

class Service:
    def handle(self, source):
        {before}
        yield True
        raise ValueError("the agent has had enough")

parts = NodeParts(group, 80, "parts")
number = Agent.of(group).add(Service())
comm.barrier()
if comm.rank == 0:
    Agent.of(group).request(1, number)
    while True:
        places = [(rank, 0) for rank in range(comm.size)]
        parts.sum(places, 10, np.dtype("f8"), 1, Deadline(None, "sum"))
comm.barrier()
"""

LEAVES_SERVERS_OPEN = """
import numpy as np
import hpcaccum as hpc

variables = [hpc.Variable(np.zeros(2), "w") for _ in range(2)]
for w in variables:
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), staleness=9)
    opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
{end}
print("the end")
"""


@pytest.mark.parametrize("before", ["pass", "raise ValueError('it has had enough')"])
def test_agent_that_raises_ends_the_job(mpirun, script, before):
    result = mpirun(3, script(AGENT_RAISES.format(before=before)))

    assert result.returncode
    assert result.stdout.count("has had enough") >= 1
    assert "ValueError: " in result.stdout
    assert "in handle" in result.stdout


@pytest.mark.parametrize("end", ["", "from mpi4py import MPI; MPI.Finalize()"])
def test_agents_end_with_the_program(mpirun, script, end):
    # With MPICH each rank is a node.
    program = script(LEAVES_SERVERS_OPEN.format(end=end))
    result = mpirun(3, program, env={"MPIR_CVAR_NOLOCAL": "1"})

    assert result.returncode == 0, result.stdout
    assert result.stdout.count("the end") == 3
    assert "Error" not in result.stdout

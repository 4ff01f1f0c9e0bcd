"""A rank that is killed: the launcher ends the job, and the reason is on the screen."""

from __future__ import annotations

import pytest

# What MPICH and Open MPI print.
REASONS = "KILLED BY SIGNAL: 9", "Killed (signal 9)", "exited on\nsignal 9 (Killed)"

# Rank 1 is killed after five updates, of which each needs all ranks that are left.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import hpcaccum as hpc
from hpcaccum.accumulator.protocol import AdmissionProtocol
from mpi4py import MPI

moment, rank = sys.argv[1], MPI.COMM_WORLD.rank

def die(*_):
    sys.stdout.write("killed\\n")
    sys.stdout.flush()
    # The launcher forwards what a rank has written.
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

def loss():
    if rank == 1 and calls == 5:
        if moment == "admitted":
            AdmissionProtocol.put_record = die
        elif moment != "idle":
            # Meanwhile the others come to wait for the gradient.
            time.sleep(0.5 * (moment == "awaited"))
            die()
    # The others may go on without it before the launcher ends the job.
    time.sleep(0.05 * (calls > 5))
    return 0.0, [np.ones(3)]

w = hpc.Variable(np.zeros(3), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), MPI.COMM_WORLD.size)
calls = 0
while calls < 300:
    opt.minimize(loss, var_list=[w])
    calls += 1
    if moment == "idle" and rank == 1 and calls == 5:
        die()
print("the end")
"""


@pytest.mark.parametrize("moment", ["idle", "computing", "admitted", "awaited"])
def test_the_job_ends_when_a_rank_is_killed(mpirun, script, moment):
    result = mpirun(3, script(PROGRAM), moment)

    # MPICH, Open MPI.
    assert result.returncode in (9, 128 + 9)
    assert "killed" in result.stdout
    assert any(reason in result.stdout for reason in REASONS), result.stdout
    assert "the end" not in result.stdout
    assert "Traceback" not in result.stdout

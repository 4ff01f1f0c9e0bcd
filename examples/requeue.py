"""Train until SLURM asks the ranks to stop; continue when the job is queued again.

    hpcaccum sbatch --nodes 2 -- python examples/requeue.py > requeue.sbatch
    sbatch requeue.sbatch

SLURM sends a signal to each rank. Without SLURM, send SIGUSR1 to a rank and restart the
program.
"""

import sys

import numpy as np
from mpi4py import MPI

import hpcaccum as hpc

UPDATES, DIRECTORY = 12_000, "saved-requeue"

comm = MPI.COMM_WORLD
rank = comm.rank
w = hpc.Variable(np.zeros(8, np.float32), "w")


def loss():
    x = rng.normal(size=(32, 8)).astype(np.float32)
    error = x @ (w.value - 1)  # the solution is all ones
    return float(error @ error) / 64, [x.T @ error / 32]


saved = hpc.checkpoint.load(DIRECTORY) if rank == 0 else None
with hpc.Stopping() as stop:
    with hpc.DropStaleGradientOptimizer(hpc.SGD(0.01)) as opt:
        first = comm.bcast(saved["global_step"] if saved else 0)
        if first:
            opt.restore(saved, [w])  # uses the snapshot of rank 0, the host
        else:
            opt.initialize([w])
        rng = np.random.default_rng([rank, first])  # different data than before
        while opt.global_step < UPDATES and not stop.agreed(opt.global_step):
            opt.minimize(loss)

    # All ranks have left the inner block, so there are no more updates.
    if rank == 0:
        hpc.checkpoint.save(DIRECTORY, opt.snapshot())
        print(f"updates {first} to {opt.global_step}")
    if opt.global_step < UPDATES:
        sys.exit(stop.status)  # the job is queued again

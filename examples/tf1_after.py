"""Train the model of tf1_before.py with hpcaccum: rank 0 is the parameter server.

mpiexec -n 3 python examples/tf1_after.py
"""

import numpy as np
from mpi4py import MPI

import hpcaccum as hpc

rank, workers = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
w = hpc.Variable(np.zeros(8, np.float32), "w")
b = hpc.Variable(np.zeros((), np.float32), "b")


def loss():
    error = x @ w.value + b.value - targets
    gradients = [2 * x.T @ error / len(x), 2 * error.mean()]
    return np.square(error).mean(), gradients


def save(step):
    if opt.every(100):
        hpc.checkpoint.save("tf1-checkpoints", optimizer=opt)


rng = np.random.default_rng(rank)
opt = hpc.SyncReplicasOptimizer(hpc.Adam(0.05), workers, dedicated=True)
with opt:
    opt.initialize([w, b])
    hpc.checkpoint.load("tf1-checkpoints", optimizer=opt)
    if rank == 0:
        opt.serve(save)  # returns when all workers have left
    while rank > 0 and opt.global_step < 200:
        x = rng.normal(size=(32, 8)).astype(np.float32)
        targets = x.sum(1) + 2
        receipt = opt.minimize(loss)
        if rank == 1 and opt.every(20):
            print(f"step {opt.global_step}: loss {receipt.loss:.4f}")

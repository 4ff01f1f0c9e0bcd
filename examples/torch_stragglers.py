"""Train a PyTorch model with each strategy while one rank is late.

Every strategy uses the same number of gradients. The last rank delays each of its
gradients by 20 ms.

    mpiexec -n 4 python examples/torch_stragglers.py
"""

import time

import torch
from mpi4py import MPI

import hpcaccum.torch as hpt

GRADIENTS, PERIOD, LATE = 120, 10, 0.02

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
torch.set_num_threads(1)  # ranks share the cores
quorum = max(1, size - 1)
# The strategy, its options, and the number of gradients in one update.
STRATEGIES = {
    "cross-shard": (hpt.CrossShard, {}, size),
    "sync-replicas": (hpt.SyncReplicas, {"replicas_to_aggregate": quorum}, quorum),
    "drop-stale": (hpt.DropStale, {"staleness": 2 * size}, 1),
    "agn": (hpt.AGN, {"communication_period": PERIOD}, PERIOD),
}


def batch():
    """Return inputs and targets."""
    x = torch.randn(32, 8)
    return x, x[:, :4].sum(1, keepdim=True).sin()


def train(strategy, options, gradients):
    """Train a model; return it and the optimizer."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    criterion = torch.nn.MSELoss()
    inner = torch.optim.SGD(model.parameters(), 0.05)
    with strategy(inner, module=model, **options) as opt:
        while opt.global_step < GRADIENTS // gradients:
            x, y = batch()
            if rank == size - 1:
                time.sleep(LATE)
            criterion(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return model, opt


if rank == 0:
    print("strategy       seconds  updates  accepted gradients by rank")
for name, (strategy, options, gradients) in STRATEGIES.items():
    comm.Barrier()
    began = time.perf_counter()
    model, opt = train(strategy, options, gradients)
    seconds = time.perf_counter() - began
    counts = " ".join(map(str, opt.statistics().accepted))
    if rank == 0:
        print(f"{name:14} {seconds:7.2f} {opt.global_step:8}  {counts}")

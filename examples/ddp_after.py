"""Train the network of ddp_before.py with CrossShard of hpcaccum.

mpiexec -n 2 python examples/ddp_after.py weights.pt
"""

import sys

import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcaccum.torch

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)  # ranks share the cores

generator = torch.Generator().manual_seed(1)
x = torch.randn(1024, 8, generator=generator)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
sampler = DistributedSampler(data, size, rank, seed=2)
loader = DataLoader(data, 32, sampler=sampler)

torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
)
inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
optimizer = hpcaccum.torch.CrossShard(inner, module=model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
criterion = torch.nn.MSELoss()

for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

optimizer.free()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])

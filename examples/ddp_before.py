"""Train a network with PyTorch's DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_before.py weights.pt
"""

import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.set_num_threads(1)  # ranks share the cores

generator = torch.Generator().manual_seed(1)
x = torch.randn(1024, 8, generator=generator)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=2)
loader = DataLoader(data, 32, sampler=sampler)

torch.manual_seed(3)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
criterion = torch.nn.MSELoss()

for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(ddp(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
torch.distributed.destroy_process_group()

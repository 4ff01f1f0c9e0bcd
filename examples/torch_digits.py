"""Train a PyTorch model on handwritten digits with hpcaccum's DropStale strategy.

mpiexec -n 4 python examples/torch_digits.py
"""

import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import hpcaccum.torch

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)  # ranks share the cores
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
test, train = slice(300), TensorDataset(images[300:], labels[300:])
# Each rank draws from all data, in its own order, so no data are lost if the gradients
# of a slow rank are dropped.
draws = RandomSampler(
    train, num_samples=len(train) // size, generator=torch.Generator().manual_seed(rank)
)
loader = DataLoader(train, 32, sampler=draws)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
criterion = torch.nn.CrossEntropyLoss()
inner = torch.optim.AdamW(model.parameters(), 3e-3)
with hpcaccum.torch.DropStale(inner, module=model) as opt:
    for _ in range(10):
        for x, y in loader:
            criterion(model(x), y).backward()
            opt.step()
            opt.zero_grad()

# All ranks have the parameters of the last update.
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
dropped = sum(opt.statistics().dropped)
if rank == 0:
    print(f"{accuracy:.1%} correct after {opt.global_step} updates, {dropped} dropped")

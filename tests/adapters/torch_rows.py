"""Helpers of the tests with sparse gradients of PyTorch: tables of known gradients."""

from __future__ import annotations

import numpy as np
import torch

# Threads of a rank would take the cores of the others.
torch.set_num_threads(1)

ROWS, WIDTH = 11, 3
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 1.0),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.5),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, 0.1),
}


def table(rank=0, dtype=torch.float32, kind=torch.nn.Embedding, **options):
    module = kind(ROWS, WIDTH, sparse=True, dtype=dtype, **options)
    with torch.no_grad():
        module.weight[:] = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) + rank
    return module


def words(rank, step):
    """Return indices, unsorted and repeated; of rank 1 none in step 1."""
    rng = np.random.default_rng([rank, step])
    number = 0 if (rank, step) == (1, 1) else 7
    return torch.tensor(rng.integers(0, ROWS - 2, number))


def factors(rank, step):
    rng = np.random.default_rng([9, rank, step])
    # Sums of these are exact.
    return torch.tensor(rng.integers(-8, 8, (len(words(rank, step)), WIDTH)) / 4.0)


def backward(module, rank, step):
    loss = module(words(rank, step)) * factors(rank, step).to(module.weight.dtype)
    loss.sum().backward()


def mean_of(ranks, step):
    """Return the mean of whole gradients, by the plain line of NumPy, and its rows."""
    total, rows = np.zeros((ROWS, WIDTH)), set()
    for rank in ranks:
        indices = words(rank, step).numpy()
        np.add.at(total, indices, factors(rank, step).numpy())
        rows.update(indices.tolist())
    return total / len(ranks), sorted(rows)


def sparse_mean(ranks, step, dtype=torch.float32):
    mean, rows = mean_of(ranks, step)
    values = torch.tensor(mean[rows]).to(dtype)
    return torch.sparse_coo_tensor(
        [rows], values, (ROWS, WIDTH), is_coalesced=True, check_invariants=True
    )


class Net(torch.nn.Module):
    """Rows and arrays in one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = table(kind=torch.nn.EmbeddingBag, mode="sum")
        self.last = torch.nn.Linear(WIDTH, 1)
        torch.nn.init.ones_(self.last.weight)
        torch.nn.init.zeros_(self.last.bias)

    def backward(self, rank, step):
        self.last(self.bag(words(rank, step)[None])).sum().backward()

"""Helpers of the tests with PyTorch: a model whose gradients are known."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import hpcaccum.torch as hpt

from ..mpi.support import meet
from ..mpi.training import raised, turns

# Threads of a rank would take the cores of the others.
torch.set_num_threads(1)

STRATEGIES: dict[str, Callable[..., Any]] = {
    "CrossShard": lambda opt, comm, **more: hpt.CrossShard(opt, comm=comm, **more),
    "SyncReplicas": lambda opt, comm, **more: hpt.SyncReplicas(
        opt, comm.size, comm=comm, **more
    ),
    "DropStale": lambda opt, comm, **more: hpt.DropStale(opt, 10**6, comm=comm, **more),
    "AGN": lambda opt, comm, **more: hpt.AGN(opt, 2, comm=comm, **more),
}
ONE_SIDED = [name for name in STRATEGIES if name != "CrossShard"]
# Those whose updates use one gradient of each rank.
SYNCHRONOUS = ["CrossShard", "SyncReplicas"]


def dedicated(kind: str, inner: Any, comm: Any, host: int) -> Any:
    """Return an adapter whose host only serves."""
    options = {"comm": comm, "host": host, "dedicated": True}
    if kind == "SyncReplicas":
        return hpt.SyncReplicas(inner, comm.size - 1, **options)
    return {"DropStale": hpt.DropStale, "AGN": hpt.AGN}[kind](
        inner, 10**6 if kind == "DropStale" else 1, **options
    )


def sgd(model: torch.nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


class Model(torch.nn.Module):
    """Two parameters, and a loss with given gradients."""

    def __init__(self, start: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3, 4), start, dtype=dtype))
        self.b = torch.nn.Parameter(torch.full((5,), start, dtype=dtype))

    def backward(self, rank: int, step: int, names: str = "wb") -> None:
        """Compute gradients that depend on the rank and the step."""
        loss: Any = sum(
            (parameter * gradient(name, parameter, rank, step)).sum()
            for name, parameter in self.named_parameters()
            if name in names
        )
        loss.backward()

    def values(self) -> dict[str, Any]:
        """Return copies of the parameters, as arrays."""
        return {
            n: p.detach().float().cpu().numpy().copy()
            for n, p in self.named_parameters()
        }


def gradient(name: str, like: Any, rank: int, step: int) -> Any:
    rng = np.random.default_rng([len(name), ord(name), rank, step])
    # Sums of some of them are exact, also in half precision.
    values = torch.tensor(rng.integers(-8, 9, like.shape) / 8.0, dtype=like.dtype)
    return values.to(like.device)


def groups(model: Model) -> list[dict[str, Any]]:
    """Return two parameter groups with different rates."""
    return [{"params": [model.w]}, {"params": [model.b], "lr": 0.5}]


class Plain:
    """What PyTorch does with a model on one rank: the truth.

    Args:
        make: Returns an optimizer for parameter groups.
        model: Copied.
    """

    def __init__(self, make: Callable[[Any], Any], model: Model) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make(groups(self.model))

    def update(self, at: list[tuple[int, int]], names: str = "wb") -> None:
        """Update with the mean of the gradients of some ranks and steps."""
        for name, parameter in self.model.named_parameters():
            if name in names:
                grads = [gradient(name, parameter, *each).float() for each in at]
                mean: Any = sum(grads) / len(grads)
                parameter.grad = mean.to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, values: dict[str, Any], exact: bool = False) -> None:
        for name, value in self.model.values().items():
            np.testing.assert_allclose(values[name], value, 0 if exact else 1e-5)


def by_turns(kind: str, size: int, act: Callable[[Any], Any]) -> list[Any]:
    """Call ``act`` on all ranks; on one after the other if each call is an update."""
    return [act(0)] if kind in SYNCHRONOUS else turns(range(size), act)


def train(
    opt: Any, model: Model, kind: str, rank: int, size: int, steps: range
) -> None:
    """Make steps, of one rank after the other unless they are synchronous."""
    for step in steps:

        def act(_: Any, step: int = step) -> None:
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()

        by_turns(kind, size, act)


def saved(opt: Any, rank: int, root: int = 0) -> Any:
    """Return the state of one rank as a file would hold it; None on others."""
    meet()
    state = None
    if rank == root:
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    meet()
    return state


def check_continues(
    start: Callable[[int], tuple[Any, torch.nn.Module]],
    go_on: Callable[[Any, Any, range], None],
    rank: int,
    root: int = 0,
) -> None:
    """Check that a training that continues from a state has the same bits.

    Args:
        start: Returns an adapter, and its module; called with 0 and 1.
        go_on: Makes steps with both.
        rank: Of this process.
        root: Rank that saves.
    """
    opt, module = start(0)
    with opt:
        go_on(opt, module, range(2))
        meet()
        updates = opt.global_step
        state = saved(opt, rank, root)
        go_on(opt, module, range(2, 4))
    opt, other = start(1)
    with opt:
        go_on(opt, other, range(1))
        opt.load_state_dict(state)
        assert opt.global_step == updates
        meet()
        go_on(opt, other, range(2, 4))
    for one, same in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


def same_everywhere(*tensors: torch.Tensor) -> None:
    """Check that all ranks have the same bits."""
    flat = [each.detach().cpu().contiguous().view(-1) for each in tensors]
    found = meet([each.view(torch.uint8).numpy().tobytes() for each in flat])
    assert all(each == found[0] for each in found)


def refused(call: Callable[..., Any], *args: Any, **options: Any) -> Exception:
    """Return the error of this rank, after all ranks have one of its type."""
    error = raised(call, *args, **options)
    assert isinstance(error, Exception), error
    assert len(set(meet(type(error)))) == 1
    return error

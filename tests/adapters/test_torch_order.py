"""Parameters whose elements have another order in memory, such as ``channels_last``.

The fused optimizers of PyTorch combine elements of a parameter, its gradient and its
state by their places in memory. Others round half precision by them.
"""

from __future__ import annotations

import io

import pytest
import torch

from ..mpi.support import meet
from ..mpi.training import turns
from .torch_training import STRATEGIES, SYNCHRONOUS, gradient


def transposed(dtype):
    return torch.nn.Parameter(torch.zeros(4, 3, dtype=dtype).t())


def channels_last(dtype):
    values = torch.zeros(2, 3, 2, 2, dtype=dtype)
    return torch.nn.Parameter(values.to(memory_format=torch.channels_last))


def adam(parameter, dtype=torch.float32):
    """Return an optimizer: a fused one, unless half precision depends on the order."""
    fused = dtype == torch.float32
    return torch.optim.Adam([parameter], 0.5, fused=fused, amsgrad=True)


def train(opt, parameter, kind, size, steps):
    """Make steps with the same gradient on all ranks, one rank after the other."""

    for step in steps:

        def act(_, step=step):
            for _ in range(2 if kind == "AGN" else 1):
                (parameter * gradient("w", parameter, 0, step)).sum().backward()
                opt.step()
                opt.zero_grad()

        if kind in SYNCHRONOUS:
            act(0)
        else:
            turns(range(size), act)


def expected(kind, size, made, dtype, steps, start=0):
    """Return what plain PyTorch makes of a contiguous parameter."""
    parameter = torch.nn.Parameter(torch.zeros(made(dtype).shape, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], 0.5, amsgrad=True)
    for step in range(steps):
        times = 1 if kind in SYNCHRONOUS or step < start else size
        for _ in range(times):
            parameter.grad = gradient("w", parameter, 0, step)
            optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("made", [transposed, channels_last])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_updates_are_those_of_a_contiguous_parameter(kind, made, comm, rank, size):
    parameter = made(torch.float32)
    with STRATEGIES[kind](adam(parameter), comm) as opt:
        train(opt, parameter, kind, size, range(3))
    wanted = expected(kind, size, made, torch.float32, 3)
    torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize("kind", ["SyncReplicas", "DropStale"])
def test_a_server_continues_with_state_in_that_order(kind, comm, rank, size):
    parameter = channels_last(torch.float32)
    optimizer = adam(parameter)
    for step in range(2):
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradient("w", parameter, 0, step))
        optimizer.step()
    optimizer.zero_grad()
    with STRATEGIES[kind](optimizer, comm) as opt:
        train(opt, parameter, kind, size, range(2, 4))
    wanted = expected(kind, size, channels_last, torch.float32, 4, start=2)
    torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "AGN"])
def test_training_continues_with_the_same_bits(kind, dtype, comm, rank, size):
    parameter, other = channels_last(dtype), channels_last(dtype)
    state = None
    with STRATEGIES[kind](adam(parameter, dtype), comm) as opt:
        train(opt, parameter, kind, size, range(3))
        meet()
        if rank == 0:
            file = io.BytesIO()
            torch.save(opt.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
        meet()
        train(opt, parameter, kind, size, range(3, 6))
    with STRATEGIES[kind](adam(other, dtype), comm) as opt:
        opt.load_state_dict(state)
        meet()
        train(opt, other, kind, size, range(3, 6))
    assert torch.equal(parameter, other)

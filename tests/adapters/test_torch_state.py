"""A state dictionary is of one step; training continues from it with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpcaccum as hpc

from ..common import check_error
from ..mpi.support import meet
from ..mpi.training import raised
from .torch_training import (
    STRATEGIES,
    SYNCHRONOUS,
    Model,
    by_turns,
    check_continues,
    gradient,
    groups,
    saved,
    train,
)


def adamw(model):
    return torch.optim.AdamW(groups(model), 0.1)


def check_state(state, w, updates):
    """Check that a state is that of a step, and that plain PyTorch can load it."""
    assert state["state"][0]["step"] == state["global_step"] == updates
    np.testing.assert_array_equal(state["parameters"]["parameter 0"], w)
    plain = adamw(Model())
    plain.load_state_dict(state)
    assert plain.state_dict()["state"][1]["step"] == updates


@pytest.mark.parametrize("kind", [k for k in STRATEGIES if k != "AGN"])
def test_training_continues_with_the_same_bits(kind, comm, rank, size):
    model, other = Model(), Model(start=9.0)
    with STRATEGIES[kind](adamw(model), comm) as opt:
        # Before the first update, it has the parameters only.
        saved(opt, rank)
        if rank and kind != "CrossShard":
            with pytest.raises(hpc.InvalidArgumentError, match="that of rank 0"):
                opt.state_dict()
        train(opt, model, kind, rank, size, range(2))
        opt.param_groups[0]["lr"] = 0.25
        state, updates = saved(opt, rank), opt.global_step
        if rank == 0:
            check_state(state, opt.center(model.w), updates)
        meet()
        train(opt, model, kind, rank, size, range(2, 4))
    with STRATEGIES[kind](adamw(other), comm) as opt:
        train(opt, other, kind, rank, size, range(1))
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 0.25
        assert opt.global_step == updates
        assert sum(opt.statistics().accepted) == 2 * size
        meet()
        train(opt, other, kind, rank, size, range(2, 4))
    assert torch.equal(model.w, other.w)
    assert torch.equal(model.b, other.b)


def test_agn_continues_from_the_center(comm, rank, size):
    model, other = Model(), Model(start=9.0)
    with STRATEGIES["AGN"](adamw(model), comm) as opt:
        train(opt, model, "AGN", rank, size, range(4))
        state, center = saved(opt, rank), opt.center(model.w)
    with STRATEGIES["AGN"](adamw(other), comm) as opt:
        train(opt, other, "AGN", rank, size, range(1))
        opt.load_state_dict(state)
        assert torch.equal(other.w, center)
        assert opt.global_step == 2 * size
        # The moments of the center, and none of local steps.
        assert not opt.state
        if rank == 0:
            found, expected = opt.state_dict()["state"], state["state"]
            assert torch.equal(found[0]["exp_avg"], expected[0]["exp_avg"])


@pytest.mark.parametrize("kind", ["CrossShard", "DropStale"])
def test_a_state_that_does_not_fit_changes_nothing(kind, comm, rank, size):
    model = Model()
    model.backward(0, 0)
    with STRATEGIES[kind](adamw(model), comm) as opt:
        train(opt, model, kind, rank, size, range(1))
        state = opt.state_dict() if rank == 0 else None
        before = model.values()

        def refused(**changes):
            wrong = {**state, **changes} if rank == 0 else None
            return raised(opt.load_state_dict, wrong)

        error = refused(optimizer="Adam")
        check_error(error, "is of Adam, the optimizer is AdamW")
        error = refused(parameters={"w": torch.zeros(2)})
        assert "different parameters: float32 (2,) in groups of 1, 1;" in str(error)
        error = raised(opt.load_state_dict, {"state": {}} if rank == 0 else None)
        assert isinstance(error, TypeError)
        assert np.array_equal(model.values()["w"], before["w"])
        assert opt.global_step > 0
        train(opt, model, kind, rank, size, range(1, 2))


# Parameters whose elements have another order in memory: the fused optimizers of
# PyTorch combine elements by their places in memory, others round by them


def transposed(dtype):
    return torch.nn.Parameter(torch.zeros(4, 3, dtype=dtype).t())


def channels_last(dtype):
    values = torch.zeros(2, 3, 2, 2, dtype=dtype)
    return torch.nn.Parameter(values.to(memory_format=torch.channels_last))


def adam(parameter, dtype=torch.float32):
    """Return an optimizer: a fused one, unless half precision depends on the order."""
    fused = dtype == torch.float32
    return torch.optim.Adam([parameter], 0.5, fused=fused, amsgrad=True)


def train_alike(opt, parameter, kind, size, steps):
    """Make steps with the same gradient on all ranks, one rank after the other."""

    for step in steps:

        def act(_, step=step):
            for _ in range(2 if kind == "AGN" else 1):
                (parameter * gradient("w", parameter, 0, step)).sum().backward()
                opt.step()
                opt.zero_grad()

        by_turns(kind, size, act)


def expected(kind, size, made, dtype, steps):
    """Return what plain PyTorch makes of a contiguous parameter."""
    parameter = torch.nn.Parameter(torch.zeros(made(dtype).shape, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], 0.5, amsgrad=True)
    for step in range(steps):
        times = 1 if kind in SYNCHRONOUS else size
        for _ in range(times):
            parameter.grad = gradient("w", parameter, 0, step)
            optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("made", [transposed, channels_last])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_updates_are_those_of_a_contiguous_parameter(kind, made, comm, rank, size):
    parameter = made(torch.float32)
    with STRATEGIES[kind](adam(parameter), comm) as opt:
        train_alike(opt, parameter, kind, size, range(3))
    wanted = expected(kind, size, made, torch.float32, 3)
    torch.testing.assert_close(parameter.detach(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind != "AGN"])
def test_training_continues_in_another_order_of_memory(kind, dtype, comm, rank, size):
    def start(_):
        module = torch.nn.ParameterList([channels_last(dtype)])
        return STRATEGIES[kind](adam(module[0], dtype), comm), module

    def go_on(opt, module, steps):
        train_alike(opt, module[0], kind, size, steps)

    check_continues(start, go_on, rank)

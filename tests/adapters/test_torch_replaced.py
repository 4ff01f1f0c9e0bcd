"""Memory, names and state that a program changes behind the optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.support import meet
from ..mpi.training import raised
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, Plain, groups


def sgd(model):
    return torch.optim.SGD(groups(model), 0.25)


def assign(model):
    for parameter in model.parameters():
        own, parameter.data = parameter.data, torch.zeros_like(parameter)
        parameter.data = own.clone()


def as_vector(model):
    parameters = list(model.parameters())
    flat = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    torch.nn.utils.vector_to_parameters(flat, parameters)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_modules_of_two_groups_may_have_the_same_names(kind, comm, rank):
    torch.manual_seed(rank)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(
        [{"params": each.named_parameters()} for each in (first, second)], 0.1
    )
    before = [each.detach().clone() for each in (*first.parameters(),)]
    with STRATEGIES[kind](inner, comm) as opt:
        for _ in range(2):
            second(first(torch.ones(1, 2))).sum().backward()
            opt.step()
            opt.zero_grad()
    values = [each.detach().numpy() for each in (*first.parameters(),)]

    if rank == 0:
        pairs = zip(before, values, strict=True)
        assert all((a.numpy() != b).any() for a, b in pairs)
    for others in zip(*meet(values), strict=True):
        assert all((each == others[0]).all() for each in others)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_values_in_other_memory_are_assigned(kind, comm, rank):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        model.w.data = torch.full_like(model.w, rank + 2.0)
        opt.assign()
        assert (model.values()["w"] == 2).all()
        assert (opt.center(model.w) == 2).all()


@pytest.mark.parametrize("replace", [assign, as_vector])
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_memory_of_parameters_may_be_replaced(kind, replace, comm, rank, size):
    model = Model(start=1.0)
    plain = Plain(lambda given: torch.optim.SGD(given, 0.25), model)
    with STRATEGIES[kind](sgd(model), comm) as opt:
        for step in range(4):
            if step == 2:
                replace(model)
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()
            plain.update([(r, step) for r in range(size)])
        if rank == 0:
            replace(model)
            saved = {n: t.numpy() for n, t in opt.state_dict()["parameters"].items()}
            saved = dict(zip(("w", "b"), saved.values(), strict=True))
            plain.check(saved)
        meet()

    plain.check(model.values())


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_model_that_is_converted_later_is_an_error(kind, comm):
    model = Model()
    opt = STRATEGIES[kind](sgd(model), comm)
    kept = {name: each.data for name, each in model.named_parameters()}
    model.to(torch.bfloat16)
    error = raised(opt.step)
    assert type(error) is hpc.InvalidArgumentError
    assert "has been replaced: it was torch.float32 of (3, 4) on cpu" in str(error)
    assert "is torch.bfloat16 of (3, 4)" in str(error)
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    opt.free()


def test_a_model_may_be_converted_at_the_end_if_its_rank_has_the_parameters(comm, rank):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        model.backward(rank, 0)
        opt.step()
        expected = model.values()
        model.to(torch.bfloat16)

    for name, value in model.values().items():
        np.testing.assert_allclose(value, expected[name], 1e-2)


class Averages(torch.nn.Module):
    """A module that assigns its buffer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        self.mean = self.mean + x
        return self.w * x


@pytest.mark.parametrize("mode", ["average", "broadcast"])
def test_buffers_that_a_module_assigns_are_synchronized(mode, comm, rank, size):
    module = Averages()
    inner = torch.optim.SGD(module.parameters(), 0.1)
    with hpt.CrossShard(inner, module=module, buffers=mode, comm=comm) as opt:
        for _ in range(2):
            module(torch.full((1,), float(rank))).backward()
            opt.step()
            opt.zero_grad()
            opt.sync_buffers()

    expected = 0 if mode == "broadcast" else 2 * np.mean(np.arange(size))
    np.testing.assert_allclose(module.mean.numpy(), [expected])


@pytest.mark.ranks(min=2)
def test_buffers_that_differ_later_are_an_error(comm, rank):
    module = Averages()
    inner = torch.optim.SGD(module.parameters(), 0.1)
    opt = hpt.CrossShard(inner, module=module, comm=comm)
    module.mean = torch.zeros(1 + (rank == 1))
    assert type(raised(opt.sync_buffers)) is hpc.DisagreementError
    module.mean = torch.zeros(1)
    opt.free()


@pytest.mark.ranks(min=2)
def test_state_that_one_rank_has_loaded_is_an_error(comm, rank):
    model = Model()
    inner = torch.optim.Adam(groups(model), 0.1)
    if rank == 0:
        model.backward(0, 0)
        inner.step()
    error = raised(hpt.CrossShard, inner, comm=comm)

    assert type(error) is hpc.DisagreementError
    text = "state of the optimizer (load it on all ranks) must be the same on all"
    assert text in str(error)

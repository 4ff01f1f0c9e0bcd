"""Backward passes that do more, or less, than compute each gradient once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpcaccum.torch as hpt

from ..mpi.support import meet
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, gradient


def sgd(model):
    return torch.optim.SGD(model.parameters(), 1.0)


def check_values(model, expected):
    for name, parameter in model.named_parameters():
        found = parameter.detach().double().numpy()
        np.testing.assert_allclose(found, expected(name, parameter), atol=1e-6)


def total(name, like, at):
    return sum(gradient(name, like, *each).double() for each in at)


# Parameters that are trained later


def test_a_parameter_that_is_trained_later_is_averaged_in_its_pass(comm, rank, size):
    model = Model()
    model.b.requires_grad_(False)
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        model.backward(rank, 0, "w")
        model.b.requires_grad_(True)
        for step in range(2):
            model.backward(rank, step, "b")
            found = model.b.grad * size
            at = [(each, s) for each in range(size) for s in range(step + 1)]
            assert torch.allclose(found.double(), total("b", model.b, at))
        opt.step()
    at = {"w": [(each, 0) for each in range(size)], "b": at}
    check_values(model, lambda name, like: -total(name, like, at[name]) / size)


# Hooks of the user


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_hook_that_is_added_later_may_change_gradients(kind, comm, rank, size):
    """Also if the exchange of large gradients begins before the pass has ended."""

    def hook(parameter):
        parameter.grad.mul_(0.5)

    model = torch.nn.ParameterList(torch.zeros(200_000) for _ in range(2))
    with STRATEGIES[kind](sgd(model), comm) as opt:
        for parameter in model:
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            sum(parameter.sum() for parameter in model).backward()
            # No rank is late.
            meet()
            opt.step()
            opt.zero_grad()
    assert all(parameter.eq(-1).all() for parameter in model)


# Gradients of gradients


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_loss_may_have_gradients_of_an_earlier_pass(kind, comm, rank, size):
    model, plain = (torch.nn.ParameterList([torch.ones(3)]) for _ in range(2))

    def loss(model, rank):
        return (model[0] ** 3).sum() * (rank + 1)

    with STRATEGIES[kind](sgd(model), comm) as opt:
        loss(model, rank).backward(create_graph=True)
        model[0].grad.sum().backward()
        opt.step()
    (sum(loss(plain, each) for each in range(size)) / size).backward(create_graph=True)
    plain[0].grad.sum().backward()
    torch.testing.assert_close(model[0], plain[0] - plain[0].grad)


# Passes that fail


class Failing(torch.autograd.Function):
    """The identity; its gradient is an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


def fail(model):
    """Begin a backward pass that ends after the gradient of w."""
    with pytest.raises(ArithmeticError):
        (Failing.apply(model.b.sum()) + (model.w * 5).sum()).backward()
    assert model.w.grad.eq(5).all()
    assert model.b.grad is None


@pytest.mark.parametrize("fails", ["one rank", "all ranks"])
@pytest.mark.parametrize("then", ["backward", "no_sync", "other", "step"])
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_the_pass_after_one_that_failed(kind, then, fails, comm, rank, size):
    model = Model()
    names = "b" if then == "other" else "wb"
    with STRATEGIES[kind](sgd(model), comm) as opt:
        if fails == "all ranks" or rank == size - 1:
            fail(model)
        model.zero_grad() if rank % 2 else opt.zero_grad()
        if then == "step":
            for name, each in model.named_parameters():
                each.grad = gradient(name, each, rank, 0)
        elif then == "no_sync":
            with opt.no_sync():
                model.backward(rank, 0)
        else:
            model.backward(rank, 0, names)
        opt.step()
        opt.zero_grad()
        model.backward(rank, 1, names)
        opt.step()
    at = [(each, step) for each in range(size) for step in range(2)]
    check_values(model, lambda n, p: -total(n, p, at) / size * (n in names))

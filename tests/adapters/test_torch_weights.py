"""Weights with PyTorch: batches of different length train as one process does."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import hpcaccum as hpc

from ..mpi.training import meet, raised
from .torch_training import STRATEGIES, SYNCHRONOUS, Model

LENGTHS = (32, 8, 24, 3)
STEPS = 3


def data(size):
    """Return the samples of each rank."""
    rng = np.random.default_rng(0)
    return [
        torch.tensor(rng.normal(size=(n, 4)), dtype=torch.float64)
        for n in LENGTHS[:size]
    ]


def loss(model, x):
    return ((x @ model.weight.T + model.bias - 1) ** 2).mean()


def linear():
    model = torch.nn.Linear(4, 2, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    return model


def of_one_process(size, make):
    model, x = linear(), torch.cat(data(size))
    opt = make(model.parameters())
    for _ in range(STEPS):
        opt.zero_grad()
        loss(model, x).backward()
        opt.step()
    return model


def in_a_block(opt, model, x):
    with opt.weighted(len(x)):
        loss(model, x).backward()
        opt.step()


def in_a_closure(opt, model, x):
    def closure():
        value = loss(model, x)
        value.backward()
        return value

    assert opt.step(closure, weight=len(x)).loss > 0


def after_no_sync(opt, model, x):
    with opt.no_sync():
        (loss(model, x) / 2).backward()
        (loss(model, x) / 2).backward()
    opt.step(weight=len(x))


def in_step(opt, model, x):
    loss(model, x).backward()
    opt.step(weight=len(x))


@pytest.mark.parametrize("way", [in_a_block, in_a_closure, after_no_sync, in_step])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_batches_of_different_length_are_as_one(comm, rank, size, name, way):
    if (name, way) == ("CrossShard", in_step):
        pytest.skip("the backward pass exchanges the gradients")
    model, x = linear(), data(size)[rank]

    def make(parameters):
        return torch.optim.Adam(parameters, 0.1)

    opt = STRATEGIES[name](make(model.parameters()), comm, module=model)
    with opt:
        for _ in range(STEPS):
            opt.zero_grad()
            way(opt, model, x)
    expected = of_one_process(size, make)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["DropStale", "AGN"])
def test_a_weight_multiplies_the_gradient(comm, size, name):
    model = Model()
    opt = STRATEGIES[name](torch.optim.SGD(model.parameters(), 1.0), comm, module=model)
    with opt:
        for _ in range(2):
            model.zero_grad()
            model.w.sum().backward()
            opt.step(weight=0.25)
    # Two updates of each rank, or one of the mean of two gradients.
    updates = size * (2 if name == "DropStale" else 1)
    np.testing.assert_allclose(model.values()["w"], -0.25 * updates)


@pytest.mark.parametrize("weight", [2, True])
def test_a_weight_comes_too_late_for_gradients_that_were_exchanged(comm, weight):
    model = Model()
    opt = STRATEGIES["CrossShard"](
        torch.optim.SGD(model.parameters(), 1.0), comm, module=model
    )
    with opt:
        model.backward(0, 0)
        error = raised(opt.step, weight=weight)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "in a block of weighted()" in str(error)
        opt.step(weight=1)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_is_no_weight_is_an_error(comm, rank, size, name):
    model = Model()
    opt = STRATEGIES[name](torch.optim.SGD(model.parameters(), 1.0), comm, module=model)
    with opt:

        def train(weight):
            with opt.weighted(weight):
                model.backward(rank, 0)
                opt.step()

        error = raised(train, 0 if rank == size - 1 or name != "CrossShard" else 1)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "weight must be a finite number above 0" in str(error)
        meet()
        opt.zero_grad()
        with contextlib.suppress(hpc.WaitTimeoutError):
            train(1)
        assert opt.global_step == 1

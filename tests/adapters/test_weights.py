"""Weights of gradients of PyTorch and JAX: batches of different length are as one."""

from __future__ import annotations

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.jax as hpj

from ..mpi.support import meet
from ..mpi.training import check_error, raised
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, sgd

LENGTHS = (32, 8, 24, 3)
STEPS = 3


def data(size):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, 4)).astype(np.float32) for n in LENGTHS[:size]]


def loss(w, x):
    return ((x @ w - 1) ** 2).mean()


def start():
    w = torch.nn.Parameter(torch.full((4,), 0.5))
    return w, torch.optim.Adam([w], 0.1)


def of_one_process(size):
    (w, opt), x = start(), torch.tensor(np.concatenate(data(size)))
    for _ in range(STEPS):
        opt.zero_grad()
        loss(w, x).backward()
        opt.step()
    return w.detach()


def in_a_block(opt, w, x):
    with opt.weighted(len(x)):
        loss(w, x).backward()
        opt.step()


def after_a_block(opt, w, x):
    with opt.weighted(len(x)):
        loss(w, x).backward()
    opt.step()


def after_a_block_without_sync(opt, w, x):
    with opt.weighted(len(x)), opt.no_sync():
        loss(w, x).backward()
    opt.step()


def in_a_closure(opt, w, x):
    def closure():
        value = loss(w, x)
        value.backward()
        return value

    assert opt.step(closure, weight=len(x)).loss > 0


def after_no_sync(opt, w, x):
    with opt.no_sync():
        (loss(w, x) / 2).backward()
        (loss(w, x) / 2).backward()
    opt.step(weight=len(x))


WAYS = [
    in_a_block,
    after_a_block,
    after_a_block_without_sync,
    in_a_closure,
    after_no_sync,
]


def in_step(opt, w, x):
    loss(w, x).backward()
    opt.step(weight=len(x))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(SYNCHRONOUS, WAYS),
        # The backward pass of CrossShard exchanges the gradients.
        ("SyncReplicas", in_step),
    ],
)
def test_batches_of_torch(comm, rank, size, name, way):
    (w, inner), x = start(), torch.tensor(data(size)[rank])
    with STRATEGIES[name](inner, comm) as opt:
        for _ in range(STEPS):
            opt.zero_grad()
            way(opt, w, x)
    np.testing.assert_allclose(w.detach(), of_one_process(size), 1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("compared", [False, True])
def test_batches_of_jax(average, rank, size, compiled, compared):
    x, w = data(size)[rank], jnp.full(4, 0.5)
    rule = optax.chain(average, optax.adam(0.1))

    def step(w, state, weight):
        params = w if compared else None
        updates, state = rule.update(jax.grad(loss)(w, x), state, params, weight=weight)
        return optax.apply_updates(w, updates), state

    step, state = jax.jit(step) if compiled else step, rule.init(w)
    for _ in range(STEPS):
        w, state = step(w, state, len(x))
    np.testing.assert_allclose(w, of_one_process(size), 1e-5)


def test_batches_of_jax_with_a_server(comm, rank, size):
    x, w = data(size)[rank], jnp.full(4, 0.5)
    with hpj.SyncReplicas(optax.adam(0.1), w, size, comm=comm) as opt:
        for _ in range(STEPS):
            w, receipt = opt.push(jax.grad(loss)(w, x), weight=len(x))
            assert receipt
    np.testing.assert_allclose(w, of_one_process(size), 1e-5)


@pytest.mark.parametrize("name", ["DropStale", "AGN"])
@pytest.mark.parametrize("block", [False, True])
def test_a_weight_multiplies_the_gradient(comm, size, name, block):
    model = Model()
    with STRATEGIES[name](sgd(model), comm) as opt:
        # A program may skip the step after a block.
        with opt.weighted(8):
            model.w.sum().backward()
        for weight in (None, 0.25):
            model.zero_grad()
            with opt.weighted(weight) if block and weight else contextlib.nullcontext():
                model.w.sum().backward()
            opt.step(weight=None if block else weight)
        # The next step has no weight, also without a backward pass.
        for _ in range(2):
            model.w.grad = torch.ones(3, 4)
            opt.step()
    # Each gradient is an update, or the mean of two is one.
    updates = size * (1 if name == "DropStale" else 0.5)
    np.testing.assert_allclose(model.values()["w"], -3.25 * updates)


@pytest.mark.parametrize("weight", [2, True])
def test_a_weight_comes_too_late_for_gradients_that_were_exchanged(comm, weight):
    model = Model()
    with STRATEGIES["CrossShard"](sgd(model), comm) as opt:
        model.backward(0, 0)
        error = raised(opt.step, weight=weight)
        check_error(error, "in a block of weighted()")
        with opt.weighted(weight):
            assert str(raised(opt.step)) == str(error)
        opt.step(weight=1)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_is_no_weight_is_an_error(comm, rank, size, name):
    model = Model()
    with STRATEGIES[name](sgd(model), comm) as opt:

        def train(weight):
            with opt.weighted(weight):
                model.backward(rank, 0)
                opt.step()

        error = raised(train, 0 if rank == size - 1 or name != "CrossShard" else 1)
        check_error(error, "weight must be a finite number above 0")
        meet()
        opt.zero_grad()
        with contextlib.suppress(hpc.WaitTimeoutError):
            train(1)
        assert opt.global_step == 1


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), None, True, [1.0, 2.0]])
def test_what_is_no_weight_is_an_error_of_average(average, rank, size, weight):
    grads = jnp.ones(2)
    average.update(grads, average.init(grads))
    mine = weight if rank == size - 1 else 2.0

    def update():
        found, _ = average.update(grads, average.init(grads), weight=mine)
        return jax.block_until_ready(found)

    assert "weight must be a finite number above 0" in str(raised(update))
    found, _ = average.update(grads, average.init(grads), weight=3)
    np.testing.assert_array_equal(found, grads)

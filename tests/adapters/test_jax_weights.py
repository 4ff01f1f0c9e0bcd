"""Weights with JAX: batches of different length train as one process does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hpcaccum as hpc
import hpcaccum.jax as hpj

from ..mpi.training import raised

LENGTHS = (32, 8, 24, 3)
STEPS = 3


def data(size):
    """Return the samples of each rank."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(n, 4)).astype(np.float32) for n in LENGTHS[:size]]


def gradient(w, x):
    return jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w)


def of_one_process(size):
    rule, x = optax.adam(0.1), np.concatenate(data(size))
    w = jnp.full(4, 0.5)
    state = rule.init(w)
    for _ in range(STEPS):
        updates, state = rule.update(gradient(w, x), state)
        w = optax.apply_updates(w, updates)
    return w


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("compared", [False, True])
def test_batches_of_different_length_are_as_one(comm, rank, size, compiled, compared):
    x, w = data(size)[rank], jnp.full(4, 0.5)
    average = hpj.average(comm)
    rule = optax.chain(average, optax.adam(0.1))

    def step(w, state, weight):
        params = w if compared else None
        updates, state = rule.update(gradient(w, x), state, params, weight=weight)
        return optax.apply_updates(w, updates), state

    step, state = jax.jit(step) if compiled else step, rule.init(w)
    for _ in range(STEPS):
        w, state = step(w, state, len(x))
    np.testing.assert_allclose(w, of_one_process(size), 1e-5)
    average.free()


def test_a_server_uses_the_weighted_mean(comm, rank, size):
    x, w = data(size)[rank], jnp.full(4, 0.5)
    with hpj.SyncReplicas(optax.adam(0.1), w, size, comm=comm) as opt:
        for _ in range(STEPS):
            w, receipt = opt.push(gradient(w, x), weight=len(x))
            assert receipt
        np.testing.assert_allclose(w, of_one_process(size), 1e-5)


def test_a_weight_multiplies_the_gradient(comm, size):
    with hpj.DropStale(optax.sgd(1.0), jnp.zeros(2), 10**6, comm=comm) as opt:
        opt.push(jnp.ones(2), weight=0.25)
    np.testing.assert_allclose(opt.params, -0.25 * size)


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), None, True, [1.0, 2.0]])
def test_what_is_no_weight_is_an_error_of_all_ranks(comm, rank, size, weight):
    average = hpj.average(comm)
    grads = jnp.ones(2)
    average.update(grads, average.init(grads))
    mine = weight if rank == size - 1 else 2.0

    def update():
        found, _ = average.update(grads, average.init(grads), weight=mine)
        return jax.block_until_ready(found)

    assert "weight must be a finite number above 0" in str(raised(update))
    found, _ = average.update(grads, average.init(grads), weight=3)
    np.testing.assert_array_equal(found, grads)
    average.free()


def test_a_server_refuses_what_is_no_weight(comm):
    with hpj.SyncReplicas(optax.sgd(1.0), jnp.zeros(2), 1, comm=comm) as opt:
        error = raised(opt.push, jnp.ones(2), weight=0)
    assert isinstance(error, hpc.InvalidArgumentError)
    assert "weight must be a finite" in str(error)

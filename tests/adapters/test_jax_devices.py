"""`average` and `mean` where a rank has several devices, and inside of `jax.vmap`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hpcaccum.jax
from hpcaccum import InvalidArgumentError

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")


@pytest.fixture
def average(comm):
    made = hpcaccum.jax.average(comm)
    yield made
    made.free()


def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("d",))


def sharded(function):
    return shard_map(function, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))


MAPS = {
    "vmap": jax.vmap,
    "vmap of jit": lambda function: jax.vmap(jax.jit(function)),
    "jit of vmap": lambda function: jax.jit(jax.vmap(function)),
    "vmap of an axis": lambda function: jax.vmap(function, axis_name="i"),
    "map": lambda function: lambda x: jax.lax.map(function, x, batch_size=2),
    "pmap": jax.pmap,
    "pmap of jit": lambda function: jax.pmap(jax.jit(function)),
    "shard_map": sharded,
    "jit of shard_map": lambda function: jax.jit(sharded(jax.jit(function))),
}


@pytest.mark.parametrize("mapped", MAPS)
def test_what_maps_a_function_is_refused(average, comm, mapped):
    state = average.init(None)
    functions = [
        lambda x: average.update(x, state)[0],
        lambda x: average.update(jnp.ones(3), state, x)[0],
        lambda x: hpcaccum.jax.mean(x, comm),
    ]

    for function in functions:
        with pytest.raises(InvalidArgumentError, match=r"cannot be called inside of"):
            MAPS[mapped](function)(jnp.ones((2, 3)))

    # Nothing waits.
    average.update(jnp.ones(3), state)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kept", [P(), P("d")], ids=["whole", "divided"])
def test_arrays_on_several_devices(average, rank, size, compiled, kept):
    rule = optax.chain(average, optax.sgd(0.5))
    batch = jnp.arange(4.0) * (1 + 2 * rank)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.sum(x) * jnp.sum(p))(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    params = jax.device_put(jnp.ones(4), NamedSharding(mesh(), kept))
    x = jax.device_put(batch, NamedSharding(mesh(), P("d")))
    state = rule.init(params)
    for _ in range(3):
        params, state = step(params, state, x)

    # The mean of 1, 3, 5, ... is the number of ranks.
    assert params.sharding.is_equivalent_to(NamedSharding(mesh(), kept), 1) or compiled
    for shard in params.addressable_shards:
        same = np.full(4, 1 - 3 * 0.5 * 6 * size, np.float32)[shard.index]
        np.testing.assert_array_equal(np.asarray(shard.data), same)
    mean = hpcaccum.jax.mean(x, average._averager._group)
    np.testing.assert_array_equal(np.asarray(mean), np.arange(4.0) * size)
    assert mean.sharding == x.sharding


def test_arrays_of_another_device(average, rank, size):
    device = jax.devices()[1]
    grads = jax.device_put(jnp.full(2, 2.0 * rank), device)

    mean, _ = average.update(grads, average.init(grads), grads * 0)

    assert mean.devices() == {device}
    np.testing.assert_array_equal(np.asarray(mean), np.full(2, size - 1.0))

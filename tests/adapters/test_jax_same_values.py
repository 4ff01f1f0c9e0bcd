"""The same values on all ranks: `average` compares parameters, `broadcast`, `mean`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hpcaccum.jax
from hpcaccum import DisagreementError, InvalidArgumentError

from ..common import same_bits

# Where nothing is compiled, older versions raise the error itself.
ERRORS = (jax.errors.JaxRuntimeError, DisagreementError)


def all_kinds():
    """Parameters of many dtypes and shapes."""
    return {
        "float32": jnp.arange(6.0).reshape(2, 3),
        "bfloat16": [jnp.ones(3, jnp.bfloat16), None],
        "nan": jnp.array([jnp.nan, -0.0]),
        "scalar": jnp.float16(2),
        "integers": np.arange(4),
        "number": 0.1,
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 2)),
        "function": jnp.tanh,
    }


def plain(average):
    return optax.chain(average, optax.adam(0.1))


WRAPPERS = {
    "chain": plain,
    "multi_transform": lambda a: optax.multi_transform(
        {"mean": plain(a), "alone": optax.sgd(0.1)}, {"w": "alone", "b": "mean"}
    ),
    "multi_steps": lambda a: optax.MultiSteps(plain(a), 1),
    "hyperparams": lambda a: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(a, optax.sgd(learning_rate))
    )(learning_rate=0.1),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("wrapper", "compiled"), [*((name, True) for name in WRAPPERS), ("chain", False)]
)
def test_ranks_that_start_with_other_parameters(
    average, comm, rank, size, wrapper, compiled
):
    rule = WRAPPERS[wrapper](average)
    update = jax.jit(rule.update) if compiled else rule.update
    params = {"w": jnp.zeros(3), "b": jnp.full(2, 1.0 if rank < size - 1 else 2.0)}
    state, grads = rule.init(params), jax.tree.map(jnp.ones_like, params)

    with pytest.raises(ERRORS, match=r"leaf \['b'\] of params .*jax\.broadcast"):
        jax.block_until_ready(update(grads, state, params))

    # The exchange is still usable.
    params = hpcaccum.jax.broadcast(params, comm)
    for _ in range(2):
        updates, state = update(grads, state, params)
    assert np.all(np.asarray(updates["b"]) < 0)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", [None, *sorted(all_kinds().keys() - {"empty"})])
def test_parameters_are_compared_by_their_bits(average, rank, name):
    changed = {
        "float32": lambda leaf: leaf.at[1, 2].set(np.nextafter(np.float32(5), 6)),
        "bfloat16": lambda leaf: [leaf[0] + 1, None],
        "nan": lambda leaf: leaf.at[1].set(0.0),
        "scalar": lambda leaf: leaf.astype(jnp.float32),
        "integers": lambda leaf: leaf.reshape(2, 2),
        "number": lambda leaf: 0.2,
        "key": lambda leaf: jax.random.key(4),
        "function": lambda leaf: jnp.sin,
    }
    params = all_kinds()
    if name and rank:
        params[name] = changed[name](params[name])
    update = average.update

    if name in (None, "function"):
        update(jnp.ones(2), average.init(params), params)
    else:
        with pytest.raises(ERRORS, match=rf"leaf \['{name}'\]"):
            jax.block_until_ready(update(jnp.ones(2), average.init(params), params))


@pytest.mark.parametrize("compiled", [True, False])
def test_each_state_compares_once(average, caplog, rank, size, compiled):
    update = jax.jit(average.update) if compiled else average.update
    grads, other = jnp.ones(2), jnp.full(3, rank)
    _, state = update(grads, average.init(other), jnp.zeros(3))
    mean, state = update(grads, state, other)
    jax.block_until_ready(mean)

    # One that another job has saved, or a checkpoint of it.
    with jax.log_compiles():
        state = jax.tree.map(jnp.asarray, jax.tree.map(lambda leaf: leaf + 2, state))
        if size > 1:
            with pytest.raises(ERRORS, match="of params"):
                jax.block_until_ready(update(grads, state, other))
        _, state = update(grads, state, jnp.zeros(3))
    assert not compiled or "Compiling jit(update)" not in caplog.text

    def step(carry, grad):
        params, state = carry
        mean, state = average.update(grad, state, params)
        return (params - mean, state), None

    start = jnp.zeros(2), average.init(None)
    (params, _), _ = jax.jit(lambda: jax.lax.scan(step, start, jnp.ones((4, 2))))()
    same_bits(np.asarray(params), np.full(2, -4, np.float32))


@pytest.mark.ranks(min=2)
def test_states_that_disagree(average, rank):
    params, grads = jnp.zeros(2), jnp.ones(2)
    _, state = average.update(grads, average.init(params), params)
    if rank == 1:
        state = average.init(params)

    with pytest.raises(ERRORS, match=r"of params .* has nothing"):
        jax.block_until_ready(average.update(grads, state, params))


def test_a_state_that_is_none_of_average(average, rank, size):
    params, update = jnp.zeros(2), jax.jit(average.update)
    good = average.update(params, average.init(params), params)[1]
    state = optax.EmptyState() if rank == size - 1 else good

    with pytest.raises(jax.errors.JaxRuntimeError, match="state must be what init"):
        jax.block_until_ready(update(params, state, params))


@pytest.mark.ranks(min=2)
def test_an_update_that_all_drop_compares_nothing(comm, rank, keep):
    average = keep(hpcaccum.jax.average(comm, on_nonfinite="drop"))
    params, state = jnp.full(2, rank), average.init(None)

    _, state = average.update(jnp.full(2, jnp.nan), state, params)
    with pytest.raises(ERRORS, match="of params"):
        jax.block_until_ready(average.update(jnp.ones(2), state, params))


def test_broadcast(comm, rank, size):
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def tree(of):
        return {
            "array": jax.device_put(jnp.arange(6.0).reshape(2, 3) * of, device),
            "bfloat16": jnp.full(3, of, jnp.bfloat16),
            "others": [np.full((2, 2), of), np.float64(of), 0.1 * of, of, of > 0, None],
            "key": jax.random.split(jax.random.key(of), 2),
            "scalar": jnp.float16(of),
            "empty": jnp.zeros((0, 2)),
        }

    mine = tree(rank + 1)
    found = hpcaccum.jax.broadcast(mine, comm, root=size - 1)

    assert jax.tree.structure(found) == jax.tree.structure(mine)
    for leaf, own, wanted in zip(
        *map(jax.tree.leaves, (found, mine, tree(size))), strict=True
    ):
        assert type(leaf) is type(own)
        if isinstance(leaf, jax.Array):
            assert leaf.dtype == wanted.dtype
            assert leaf.sharding == own.sharding
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
            leaf, wanted = map(jax.random.key_data, (leaf, wanted))
        same_bits(np.asarray(leaf), np.asarray(wanted))
    assert found["array"].sharding == sharding


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("other", "root", "error", "message"),
    [
        ({"w": jnp.ones(4)}, 0, DisagreementError, r"leaf \['w'\] .*shape=\(4,\)"),
        ({"w": jnp.ones(3), "b": 1}, 0, DisagreementError, "structure must be"),
        ([jnp.ones(3)], 0, DisagreementError, r"leaf \['w'\]"),
        ({"w": "text"}, 0, TypeError, "must be arrays or numbers, got str"),
        ({"w": jnp.ones(3)}, 1, DisagreementError, "root must be the same"),
        ({"w": jnp.ones(3)}, 9, InvalidArgumentError, "root must be a rank"),
    ],
)
def test_broadcast_of_wrong_arguments(comm, rank, size, other, root, error, message):
    mine = (other, root) if rank == size - 1 else ({"w": jnp.ones(3)}, 0)

    with pytest.raises(error, match=message):
        hpcaccum.jax.broadcast(mine[0], comm, root=mine[1])


def test_broadcast_is_not_traced(comm):
    with pytest.raises(InvalidArgumentError, match=r"inside of jax\.jit"):
        jax.jit(lambda x: hpcaccum.jax.broadcast(x, comm))(jnp.ones(2))


@pytest.mark.parametrize("compiled", [True, False])
def test_mean(comm, rank, size, compiled):
    def means(x):
        tree = {"loss": x * 2, "more": (jnp.full(2, x, jnp.bfloat16), None)}
        return hpcaccum.jax.mean(tree, comm), hpcaccum.jax.mean(x, comm)

    for call in range(2):
        many, one = (jax.jit(means) if compiled else means)(2.0 * rank + call)
        expected = size - 1.0 + call
        same_bits(np.asarray(one), np.float32(expected))
        same_bits(np.asarray(many["loss"]), np.float32(2 * expected))
        same_bits(np.asarray(many["more"][0]), jnp.full(2, expected, jnp.bfloat16))


def test_a_mean_of_what_is_no_float(comm, rank, size):
    # No rank has the exchange of such a value yet.
    value, own = 3 if rank == size - 1 else 1.5, comm.Dup()

    with pytest.raises(InvalidArgumentError, match=r"must be of .* got int32"):
        hpcaccum.jax.mean(value, own)

    same_bits(np.asarray(hpcaccum.jax.mean(2.0 * rank, own)), np.float32(size - 1))
    own.Free()


def test_a_mean_is_not_part_of_the_rule_of_a_server(comm):
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: g * hpcaccum.jax.mean(1.0, comm), updates), state

    rule = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(InvalidArgumentError, match="mean cannot be part of the rule"):
        hpcaccum.jax.DropStale(rule, jnp.ones(2), 1, comm=comm)

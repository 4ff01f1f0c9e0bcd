"""`hpcaccum.jax.average`: the mean over the ranks, compiled or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hpcaccum.jax
from hpcaccum import DisagreementError, FreedError, InvalidArgumentError

from ..common import same_bits
from ..mpi.support import meet
from .test_jax_one_sided import same_trees

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map


def tree(factor):
    """Leaves of several dtypes and shapes; all means are exact."""
    return {
        "dense": [jnp.arange(6.0).reshape(2, 3) * factor, jnp.float32(factor)],
        "bfloat16": jnp.full((3,), factor, jnp.bfloat16),
        "float16": (jnp.full((2, 1), 2 * factor, jnp.float16), None),
        "empty": jnp.zeros((0, 4)),
    }


@pytest.mark.parametrize("compiled", [True, False])
def test_mean_of_all_ranks(average, rank, size, compiled, caplog):
    assert isinstance(average, optax.GradientTransformation)
    update = jax.jit(average.update) if compiled else average.update
    state = average.init(tree(0))
    kept = []
    with jax.log_compiles():
        for call in range(3):
            caplog.clear()
            mean, state = update(tree(2 * rank + call), state)
            kept.append(mean)
    assert "io_callback" not in caplog.text

    # Later calls have not changed the earlier results.
    for call, mean in enumerate(kept):
        same_trees(mean, tree(size - 1 + call))


def test_half_precision_is_summed_in_float32(average, rank, size):
    grad = jnp.full(1, 2048 if rank == 0 else 1, jnp.float16)

    mean, _ = jax.jit(average.update)(grad, average.init(grad))

    # In float16, 2048 + 1 is 2048.
    same_bits(np.asarray(mean), np.float32([(2047 + size) / size]).astype(np.float16))


def test_a_chain_trains_as_one_process_does(average, rank, size):
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    together = optax.chain(average, rule)

    def train(rule, number):
        def step(carry, scale):
            params, state = carry
            grads = jax.tree.map(lambda leaf: leaf * scale + number, params)
            updates, state = rule.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = {"w": jnp.arange(3.0), "b": jnp.ones((2, 2))}
        start = params, rule.init(params)
        return jax.lax.scan(step, start, jnp.arange(1.0, 5.0))[0][0]

    # The mean of the numbers of all ranks is exact.
    params = jax.jit(train, static_argnums=0)(together, 2.0 * rank)
    expected = jax.jit(train, static_argnums=0)(rule, size - 1.0)

    for name in params:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6)


def test_two_pytrees_in_one_program(comm, rank, size, keep):
    first, second = (keep(hpcaccum.jax.average(comm)) for _ in range(2))

    @jax.jit
    def both(grads):
        mean, _ = first.update(grads, optax.EmptyState())
        other, _ = second.update({"sum": mean["w"] * 2}, optax.EmptyState())
        return mean, other

    mean, other = both({"w": jnp.full(4, 2.0 * rank)})

    same_bits(np.asarray(mean["w"]), np.full(4, size - 1, np.float32))
    same_bits(np.asarray(other["sum"]), np.full(4, 2 * size - 2, np.float32))


@pytest.mark.parametrize("compiled", [True, False])
def test_updates_that_are_not_finite_are_dropped(comm, rank, size, compiled):
    average, last = hpcaccum.jax.average(comm, on_nonfinite="drop"), size - 1
    update = jax.jit(average.update) if compiled else average.update
    means = []
    assert average.statistics().accepted == (0,) * size

    # No rank; the last one; all of them; no rank again.
    for spoiled in ([], [last], range(size), []):
        grads = tree(2 * rank)
        if rank in spoiled:
            grads["float16"] = (jnp.array([[1], [jnp.inf]], jnp.float16), None)
        means.append(update(grads, optax.EmptyState())[0])

    for mean, expected in zip(
        means, [last, last - 1 if size > 1 else 0, 0, last], strict=True
    ):
        same_trees(mean, tree(expected))
    # It waits for them.
    nonfinite = (*[1] * last, 2)
    assert average.statistics().nonfinite == nonfinite
    assert average.statistics().accepted == tuple(4 - each for each in nonfinite)
    average.free()
    assert average.statistics().nonfinite == nonfinite


def test_an_update_that_is_not_finite_is_an_error_on_every_rank(comm, rank, size, keep):
    average = keep(hpcaccum.jax.average(comm, on_nonfinite="raise"))
    update = jax.jit(average.update)
    wrong = {"w": jnp.ones(2), "b": jnp.array([0, jnp.nan])}
    text = r"the gradient of \"\['b'\]\" has a NaN or an infinity"

    grads = wrong if rank == size - 1 else jax.tree.map(jnp.ones_like, wrong)
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(update(grads, optax.EmptyState()))

    # The exchange is still usable.
    means = update({name: jnp.ones(2) for name in wrong}, optax.EmptyState())[0]
    same_bits(np.asarray(means["b"]), np.ones(2, np.float32))


def test_a_rule_around_which_nothing_is_dropped_sees_the_same_on_all_ranks(
    average, rank, size
):
    rule = optax.chain(average, optax.apply_if_finite(optax.adam(0.1), 3))
    params = {"w": jnp.ones(2)}
    grads = {"w": jnp.array([1.0, jnp.nan if rank == size - 1 else 1.0])}

    updates, state = jax.jit(rule.update)(grads, rule.init(params), params)

    # No rank makes an update.
    same_bits(np.asarray(updates["w"]), np.zeros(2, np.float32))
    assert state[1].total_notfinite == 1


def test_wrong_options_of_one_rank(comm, rank, size):
    options = {"on_nonfinite": "ignore"} if rank == size - 1 else {}
    with pytest.raises(InvalidArgumentError, match="on_nonfinite must be one of"):
        hpcaccum.jax.average(comm, **options)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("name", "value"), [("on_nonfinite", "drop"), ("wire_dtype", "float16")]
)
def test_options_are_the_same_on_all_ranks(comm, rank, name, value):
    with pytest.raises(DisagreementError, match=f"{name} must be the same"):
        hpcaccum.jax.average(comm, **({name: value} if rank else {}))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": jnp.ones(3), "c": jnp.ones(2)}, r"leaf \['b'\]\[0\] must be the same"),
        ({"w": jnp.ones(4), "b": [jnp.ones(2)]}, r"leaf \['w'\] must .*shape=\(4,\)"),
        ({"w": jnp.ones(3), "b": [jnp.ones(2, "float16")]}, "dtype=float16"),
        ({"w": jnp.ones(3), "b": (jnp.ones(2),)}, "structure must be the same"),
    ],
    ids=["structure", "shape", "dtype", "container"],
)
def test_ranks_that_disagree(average, rank, size, other, message):
    grads = other if rank == size - 1 else {"w": jnp.ones(3), "b": [jnp.ones(2)]}

    with pytest.raises(DisagreementError, match=f"hpcaccum.jax.average: .*{message}"):
        jax.jit(average.update)(grads, average.init(grads))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"w": jnp.arange(3)},
            InvalidArgumentError,
            r"\['w'\] of updates .* got int32",
        ),
        ({"w": None}, InvalidArgumentError, "updates has no arrays"),
        ({"w": "text"}, TypeError, "must be arrays or numbers, got str"),
    ],
    ids=["integers", "nothing", "text"],
)
def test_an_unusable_pytree_of_one_rank(average, rank, size, wrong, error, message):
    grads = wrong if rank == size - 1 else {"w": jnp.ones(3)}

    with pytest.raises(error, match=message):
        average.update(grads, average.init(grads))

    same_trees(average.update(tree(rank * 2), optax.EmptyState())[0], tree(size - 1))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_changed_pytree_is_an_error_on_every_rank(average, rank, size, everywhere):
    update = jax.jit(average.update)
    same_trees(update(tree(2 * rank), optax.EmptyState())[0], tree(size - 1))
    grads = {**tree(0), "more": jnp.ones(3)}
    changed = everywhere or rank == size - 1
    text = r"leaf \['more'\] is .*shape=\(3,\).* in the first update it was missing"

    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(update(grads if changed else tree(0), ()))

    # The exchange is still usable.
    same_trees(update(tree(2 * rank), optax.EmptyState())[0], tree(size - 1))


def test_free_waits_for_updates_that_run(comm, rank, size):
    average = hpcaccum.jax.average(comm)
    update = jax.jit(lambda grads: average.update(grads, optax.EmptyState())[0])
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ x, x))
    factors = jnp.eye(200) * (-1 if rank % 2 else 1)
    jax.block_until_ready([update(factors), slow(factors)])

    # This thread goes on while another one computes, then exchanges.
    mean = update(slow(factors) * 2 * rank)
    average.free()

    odd = sum(range(1, size, 2))
    expected = np.eye(200) * (sum(range(size)) - 2 * odd) * 2 / size
    np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_after_free(comm):
    average = hpcaccum.jax.average(comm)
    grads = {"w": jnp.ones(3)}
    update, state = jax.jit(average.update), average.init(grads)
    jax.block_until_ready(update(grads, state))
    average.free()
    meet()

    with pytest.raises(FreedError, match="average was freed"):
        average.update(grads, state)
    with pytest.raises(jax.errors.JaxRuntimeError, match="was freed"):
        jax.block_until_ready(update(grads, state))


def test_what_is_no_communicator():
    with pytest.raises(TypeError, match="comm must be an MPI intracommunicator"):
        hpcaccum.jax.average(3)


# Ranks with several devices, and `jax.vmap`


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
def test_arrays_on_several_devices(average, comm, rank, size, compiled, kept):
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
    mean = hpcaccum.jax.mean(x, comm)
    np.testing.assert_array_equal(np.asarray(mean), np.arange(4.0) * size)
    assert mean.sharding == x.sharding


def test_arrays_of_another_device(average, rank, size):
    device = jax.devices()[1]
    grads = jax.device_put(jnp.full(2, 2.0 * rank), device)

    mean, _ = average.update(grads, average.init(grads), grads * 0)

    assert mean.devices() == {device}
    np.testing.assert_array_equal(np.asarray(mean), np.full(2, size - 1.0))

"""The optimizers of `hpcaccum.jax` with a server: updates of optax, pytrees, errors."""

from __future__ import annotations

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hpcaccum.jax
from hpcaccum import DisagreementError, FreedError, InvalidArgumentError, checkpoint

from ..common import same_bits
from ..mpi.support import meet

RULE = optax.sgd(0.5, momentum=0.5)
# Its updates combine all leaves, and its state has integers and booleans.
LARGE_RULE = optax.apply_if_finite(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 3
)
# Rules that no server can use.
LOOKAHEAD = optax.lookahead(optax.sgd(0.1), 3, 0.5)
FAST_AND_SLOW = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
WIDER = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g[None], grads))
KINDS = ["DropStale", "SyncReplicas", "AGN"]


def params():
    return {
        "dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.arange(2.0)},
        "scales": [jnp.ones(4, jnp.bfloat16), jnp.full((), 0.5, jnp.float16)],
    }


@pytest.fixture
def make(comm, size, keep):
    """Make an optimizer; the last argument of each kind has a default here."""

    def make_one(kind, rule=RULE, start=None, option=None, **options):
        defaults = {"DropStale": 3 * size, "SyncReplicas": size, "AGN": 2}
        opt = getattr(hpcaccum.jax, kind)(
            rule,
            params() if start is None else start,
            defaults[kind] if option is None else option,
            comm=comm,
            **options,
        )
        return keep(opt)

    return make_one


@functools.partial(jax.jit, static_argnums=0)
def updated(rule, tree, state, grads):
    """Return what optax makes of parameters, and its state."""
    updates, state = rule.update(grads, state, tree)
    return optax.apply_updates(tree, updates), state


def grads_of(tree, number):
    """Return gradients of which the mean over consecutive numbers is nearly exact."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.25 * number), tree)


def same_trees(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert isinstance(leaf, jax.Array)
        same_bits(np.asarray(leaf), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_start_with_the_parameters_of_the_host(make, kind, rank, size):
    start = jax.tree.map(lambda leaf: leaf * (rank + 1), params())

    opt = make(kind, start=start, host=size - 1)

    expected = jax.tree.map(lambda leaf: leaf * size, params())
    same_trees(opt.params, expected)
    same_trees(opt.center(), expected)
    assert opt.global_step == 0


def test_sync_replicas_updates_as_optax_does(make, rank, size):
    expected = {"w": jnp.arange(3.0), "b": [jnp.ones(2, jnp.bfloat16)]}
    opt = make("SyncReplicas", LARGE_RULE, expected)
    tree, state = opt.params, jax.jit(LARGE_RULE.init)(expected)

    for number in range(4):
        tree, receipt = opt.push(grads_of(tree, number + 2 * rank))
        grads = grads_of(expected, number + size - 1)
        expected, state = updated(LARGE_RULE, expected, state, grads)
        assert receipt
        assert receipt.global_step == number
        same_trees(tree, expected)

    assert opt.statistics().accepted == (4,) * size


def test_drop_stale_applies_each_gradient(make, rank, size):
    opt = make("DropStale", optax.sgd(1.0), {"w": jnp.zeros(3)})

    for _ in range(5):
        assert opt.push({"w": jnp.ones(3)})[1]
    opt.free()

    assert opt.global_step == 5 * size
    assert [opt.every(n) for n in (3, 3, 40)] == [True, False, False]
    same_trees(opt.params, {"w": jnp.full(3, -5.0 * size)})


def test_agn_makes_local_updates(make, comm, rank, size):
    opt = make("AGN", option=3)
    tree, state = params(), RULE.init(params())
    for number in range(2):
        grads = grads_of(tree, rank + number)
        found, _ = opt.push(grads)
        tree, state = updated(RULE, tree, state, grads)
        same_trees(found, tree)
    assert opt.global_step == 0
    meet()

    found, receipt = opt.push(grads_of(tree, rank + 2))

    assert receipt
    if size == 1:
        mean = grads_of(params(), 1)
        center, _ = updated(RULE, params(), RULE.init(params()), mean)
        same_trees(found, center)
    opt.free()
    assert opt.global_step == size
    same_trees(opt.params, opt.center())


def test_gradients_that_are_not_finite_are_an_error(make):
    opt = make("AGN", on_nonfinite="raise")
    wrong = {**grads_of(params(), 1), "scales": [jnp.ones(4), jnp.float16(jnp.nan)]}

    text = r"'scales'\]\[1\]\" has a NaN or an infinity"
    with pytest.raises(InvalidArgumentError, match=text):
        opt.push(wrong)
    same_trees(opt.params, params())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_never_change_later(make, kind):
    opt = make(kind)
    kept = [(opt.params, jax.tree.map(np.array, opt.params))]
    for number in range(4):
        tree, _ = opt.push(grads_of(opt.params, number + 1))
        center = opt.center()
        kept += [(each, jax.tree.map(np.array, each)) for each in (tree, center)]
    meet()
    opt.free()

    for tree, copy in kept:
        same_trees(tree, copy)


def test_gradients_that_do_not_fit(make, rank):
    opt = make("DropStale")
    grads = grads_of(params(), 1)
    wrong = {**grads, "dense": {**grads["dense"], "bias": jnp.ones(3)}}

    with pytest.raises(InvalidArgumentError, match="grads must have the structure"):
        opt.push({"dense": grads["dense"]})
    with pytest.raises(InvalidArgumentError, match=r"'bias'.* must have shape \(2,\)"):
        opt.push(wrong)

    same_trees(opt.params, params())
    assert sum(opt.statistics().accepted) == 0


def last_has(rank, size, wrong, right):
    return wrong if rank == size - 1 else right


WRONG = {
    "no rule": ({"rule": "adam"}, TypeError, "GradientTransformation, .* got str"),
    "more arguments": ({"rule": optax.polyak_sgd()}, None, "extra= .* 'value'"),
    "other parameters": ({"rule": LOOKAHEAD}, None, "cannot update these params"),
    "lookahead": (
        {"rule": LOOKAHEAD, "start": FAST_AND_SLOW},
        *(None, "gradients of the same structure"),
    ),
    "shapes": ({"rule": WIDER}, None, "updates and parameters differ in shape"),
    "extra integers": ({"extra": {"value": 3}}, None, r"\['value'\] of extra .* int32"),
    "integers": ({"start": {"n": jnp.arange(3)}}, None, r"\['n'\] .* int32"),
    "empty": ({"start": {}}, None, "params has no arrays"),
    "text": ({"start": {"w": "text"}}, TypeError, "str"),
    "staleness": ({"option": "3"}, TypeError, "must be"),
    "misspelt": ({"on_nonfinit": "drop"}, TypeError, "on_nonfinit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_one_rank(make, rank, size, case):
    options, error, message = WRONG[case]
    # All ranks have those of which no exchange is.
    mine = options if "option" in options or case == "misspelt" else None
    with pytest.raises(error or InvalidArgumentError, match=message):
        make("DropStale", **(mine or last_has(rank, size, options, {})))


@pytest.mark.ranks(min=2)
def test_parameters_that_differ_between_ranks(make, rank, size):
    good = {"w": jnp.ones(3), "b": jnp.ones(2)}
    start = last_has(rank, size, {**good, "b": jnp.ones(2, "bfloat16")}, good)

    with pytest.raises(DisagreementError, match=r"jax\.DropStale: .*dtype=bfloat16"):
        make("DropStale", start=start)


def test_average_in_the_rule_of_a_server(make, average):
    with pytest.raises(InvalidArgumentError, match="cannot be part of the rule"):
        make("SyncReplicas", optax.chain(average, optax.sgd(0.1)))


def test_float64_of_one_thread(make):
    # Older versions have it elsewhere.
    place = jax if hasattr(jax, "enable_x64") else jax.experimental
    with place.enable_x64(True):
        start = {"w": jnp.ones(3)}
        with pytest.raises(InvalidArgumentError, match="in all threads"):
            make("DropStale", start=start)


def test_after_free(make):
    opt = make("DropStale")
    opt.free()

    with pytest.raises(FreedError, match="DropStale' was freed"):
        opt.push(grads_of(params(), 1))


def scaled_by_value():
    """A rule that multiplies gradients by one extra argument, and adds another."""

    def update(updates, state, params=None, *, value, shift, **_):
        updates = jax.tree.map(lambda g, s: -(g * value + s), updates, shift)
        return updates, state + value

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


EXTRA = {"value": 0.0, "shift": {"w": np.zeros(2, np.float32)}}


@pytest.mark.parametrize("kind", KINDS)
def test_extra_arguments_travel_with_the_gradients(make, kind, rank, size):
    rule = optax.chain(optax.identity(), scaled_by_value())
    option = {"DropStale": 100, "AGN": 1}.get(kind)
    opt = make(kind, rule, {"w": jnp.zeros(2)}, extra=EXTRA, option=option)

    for _ in range(2):
        grads, shift = {"w": jnp.ones(2)}, {"w": jnp.array([0.0, 1.0])}
        # The mean of 1, 3, ... is the number of ranks.
        _, receipt = opt.push(grads, value=1.0 + 2 * rank, shift=shift)
        assert receipt
    opt.free()

    means = 2 if kind == "SyncReplicas" else 2 * size
    expected = means * np.float32([-size, -size - 1])
    same_trees(opt.params, {"w": jnp.asarray(expected)})


def test_extra_arguments_that_were_not_announced(make):
    opt = make("DropStale")
    other = make("DropStale", optax.polyak_sgd(), extra={"value": 0.0})
    grads, text = grads_of(params(), 1), r"extra= names must have the structure"

    with pytest.raises(InvalidArgumentError, match=text):
        opt.push(grads, value=1.0)
    with pytest.raises(InvalidArgumentError, match=text):
        other.push(grads)
    with pytest.raises(InvalidArgumentError, match="value"):
        other.push(grads, value=jnp.ones(2))

    assert opt.push(grads)[1]
    assert other.push(grads, value=1.0)[1]


@pytest.mark.ranks(min=2)
def test_extra_arguments_are_the_same_on_all_ranks(make, rank):
    with pytest.raises(DisagreementError, match=r"extra leaf \['value'\]"):
        make("DropStale", extra={"value": jnp.zeros(1 + (rank == 1))})


def test_extra_arguments_that_are_not_finite(make, size):
    opt = make(
        "SyncReplicas", optax.polyak_sgd(), extra={"value": 0.0}, on_nonfinite="drop"
    )

    assert opt.push(grads_of(params(), 1), value=np.nan)[1].reason == "nonfinite"


def train(opt, numbers, rank):
    for number in numbers:
        opt.push(grads_of(opt.params, number + 2 * rank))


@pytest.mark.parametrize("random", [False, True], ids=["plain", "random"])
def test_a_snapshot_continues_with_the_same_bits(make, tmp_path, rank, size, random):
    host, saved, rule = size - 1, None, LARGE_RULE
    if random:
        rule = optax.chain(optax.add_noise(1.0, 0.5, 0), optax.sgd(0.1))
    start = {"w": jnp.arange(3.0), "b": [jnp.ones(2, jnp.bfloat16)]}
    opt = make("SyncReplicas", rule, start, host=host)
    train(opt, range(3), rank)
    if rank == host:
        checkpoint.save(tmp_path, opt.snapshot())
        saved = checkpoint.load(tmp_path)

    other = make("SyncReplicas", rule, grads_of(start, 7), host=host, snapshot=saved)

    assert other.global_step == 3
    assert other.statistics().accepted == (3,) * size
    same_trees(other.params, opt.params)
    meet()
    for each in (opt, other):
        train(each, range(3, 5), rank)
    same_trees(other.params, opt.params)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rule": optax.adam(0.1)}, "made with another rule"),
        ({"start": {"w": jnp.ones(2)}}, "snapshot has different variables"),
    ],
    ids=["rule", "parameters"],
)
def test_a_snapshot_that_does_not_fit(make, rank, size, other, message):
    opt = make("DropStale")
    state = opt.snapshot() if rank == 0 else None

    with pytest.raises(InvalidArgumentError, match=message):
        make("DropStale", snapshot=state, **other)
    if size > 1:
        with pytest.raises(InvalidArgumentError, match="must be passed on rank 0"):
            make("DropStale", snapshot={} if rank == 1 else None)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_assigned(kind, make, rank, size):
    opt = make(kind)
    for turn in range(2):
        opt.push(grads_of(opt.params, 1))
        meet()
        step, wanted = opt.global_step, grads_of(params(), 8 + turn)
        # Those of the host count.
        found = opt.assign(wanted if rank == 0 else None)
        same_trees(found, wanted)
        same_trees(opt.params, wanted)
        same_trees(opt.center(), wanted)
        assert opt.global_step == step
        meet()
    kept = jax.tree.map(np.array, found)
    opt.push(grads_of(opt.params, 1))
    same_trees(found, jax.tree.map(jnp.asarray, kept))


def test_parameters_that_do_not_fit_are_not_assigned(make, rank):
    opt = make("DropStale")
    for wrong in (None, {"other": jnp.ones(1)}, jax.tree.map(jnp.ravel, params())):
        with pytest.raises((TypeError, InvalidArgumentError), match="params"):
            opt.assign(wrong if rank == 0 else params())
        same_trees(opt.center(), params())
        same_trees(opt.push(grads_of(params(), 0))[0], params())
        meet()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dedicated_server_gets_parameters_while_it_serves(kind, make, rank, size):
    option = size - 1 if kind == "SyncReplicas" else None
    opt = make(kind, option=option, dedicated=True)
    wanted, steps = grads_of(params(), 8), []
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="call serve"):
            opt.push(wanted)
        opt.serve(after_update=steps.append)
        same_trees(opt.params, wanted)
        assert steps == [*range(1, opt.global_step + 1)]
    else:
        opt.push(grads_of(opt.params, 1))
        same_trees(opt.assign(wanted if rank == 1 else None), wanted)
        opt.leave()
    opt.free()
    same_trees(opt.params, wanted)

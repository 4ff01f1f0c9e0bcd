"""CrossShardOptimizer: scaling, sums, groups, None, and errors of one rank."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError, Reduction

from ..common import check_error
from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401


def shards(size):
    """Return an assignment for each size of groups, with the ranks out of order."""
    ranks = [*range(size)[::-2], *range(size)[-2::-2]]
    return [
        [ranks[i : i + width] for i in range(0, size, width)]
        for width in range(1, size + 1)
        if size % width == 0
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
def test_mean_scales_in_compute_and_sum_does_not(make, size, reduction, dtype):
    w, opt = variable(dtype=dtype), make(reduction)
    [(grad, _)] = opt.compute_gradients(gives(dtype(8)), [w])

    # 8 * (1/3) in float32 for three ranks, not 8 / 3.
    share = dtype(1 / size) if reduction == Reduction.MEAN else dtype(1)
    assert grad == dtype(8) * share
    assert grad.dtype == dtype


def test_gradients_between_compute_and_apply_are_divided(make, rank, size):
    w, opt = variable(), make()
    pairs = opt.compute_gradients(gives(float(size * rank)), [w])
    opt.apply_gradients([(np.minimum(grad, 1), var) for grad, var in pairs])

    assert w.value == -(size - 1)


def test_gradients_that_share_memory_are_divided_once(make):
    v, w, opt = variable(name="v"), variable(name="w"), make()
    opt.initialize([v, w])
    grad = opt.gradient_arrays()["v"]
    for step in range(1, 4):
        grad[...] = 8
        opt.apply_gradients(opt.compute_gradients(gives(grad, grad), [v, w]))
        np.testing.assert_allclose([v.value, w.value], -8 * step, rtol=1e-6)


def test_loss_gradient_multiplies(make, size):
    [(grad, _)] = make().compute_gradients(gives(1.0), [variable()], grad_loss=5)

    assert grad == 5 * (1 / size)


def test_groups_in_any_order_sum_apart(make, rank, size):
    everybody = [*range(size)]
    for groups in [None, [], *shards(size)]:
        w, opt = variable(), make(groups=groups)
        [(grad, _)] = opt.compute_gradients(gives(12.0), [w])
        opt.apply_gradients([(2.0**rank, w)])

        mine = next(ranks for ranks in groups or [everybody] if rank in ranks)
        assert grad == 12 * (1 / len(mine))
        assert w.value == -sum(2.0**r for r in mine)


def test_in_each_other_they_give_the_mean_of_all(make, rank, size):
    w, opt = variable(), make(inner=make())
    opt.minimize(gives(float(rank)), var_list=[w])

    np.testing.assert_allclose(w.value, -(size - 1) / 2, rtol=1e-15)


def test_none_on_all_ranks_passes(make):
    w, v = variable(name="w"), variable(name="v")
    opt = make(inner=hpc.Momentum(1, 0.5))
    for _ in range(3):
        opt.minimize(gives(1.0, None), var_list=[w, v])

    assert v.value == 0
    assert opt.get_slot(v, "momentum") is None
    np.testing.assert_allclose(w.value, -1 - 1.5 - 1.75, rtol=1e-15)


class Watching(hpc.CrossShardOptimizer):
    """Records the gradients between the two calls of minimize."""

    seen = None

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.seen = [grad for grad, _ in grads_and_vars]
        return super().apply_gradients(grads_and_vars, global_step, name)


class Doubling(hpc.CrossShardOptimizer):
    """Doubles the gradients that it computes."""

    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(2 * grad, var) for grad, var in pairs]


@pytest.mark.parametrize("kind", [Watching, Doubling, hpc.CrossShardOptimizer])
def test_minimize_uses_calls_that_are_overridden(comm, size, kind):
    w = variable()
    with kind(hpc.SGD(1), comm=comm) as opt:
        opt.minimize(gives(8.0), var_list=[w])

    np.testing.assert_allclose(w.value, -16 if kind is Doubling else -8, 1e-15)
    if kind is Watching:
        assert opt.seen == [8 * (1 / size)]


@pytest.mark.any_size
def test_a_bad_global_step_of_minimize_is_an_error_on_all(make, rank, size):
    w, opt = variable(np.zeros(3)), make()
    step = "none" if rank == size - 1 else None
    error = raised(opt.minimize, gives(np.ones(3)), step, [w])
    before = w.value.copy()
    opt.minimize(gives(np.ones(3)))

    check_error(error, "global_step must be", kind=TypeError)
    assert (before == 0).all()
    assert (w.value == -1).all()


@pytest.mark.any_size
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["a call", "a rate", "a rate in two calls"])
def test_a_rank_that_differs_is_found(make, rank, size, what):
    w, opt, last = variable(), make(), rank == size - 1
    opt.minimize(gives(1.0), var_list=[w])
    if what == "a call":
        opt.compute_gradients(gives(1.0))
        if last:
            opt.compute_gradients(gives(9.0))
        error = raised(opt.apply_gradients, [(9.0 if last else 1.0, w)])
        values, name = (2, 3), "number of calls of compute_gradients"
    else:
        opt.learning_rate = 0.25 if last else 0.5
        if what == "a rate":
            error = raised(opt.minimize, gives(1.0))
        else:
            error = raised(opt.apply_gradients, opt.compute_gradients(gives(1.0)))
        values, name = (0.5, 0.25), "learning rate"

    text = f"{name} must be the same on all {size} ranks: rank 0 has {values[0]}, "
    check_error(error, f"{text}rank {size - 1} has {values[1]}", kind=DisagreementError)
    np.testing.assert_allclose(w.value, -1, rtol=1e-15)
    # All ranks know of it, and go on.
    opt.learning_rate = 0.5
    opt.minimize(gives(1.0))
    np.testing.assert_allclose(w.value, -1.5, rtol=1e-15)


@pytest.mark.any_size
def test_only_learning_rates_that_are_numbers_are_compared(make, rank):
    w, calls = variable(), []

    def rate():
        calls.append(rank)
        return 0.5

    opt = make()
    opt.learning_rate = rate
    for _ in range(2):
        opt.minimize(gives(1.0), var_list=[w])
    # The comparison would call it once more.
    assert (w.value, len(calls)) == (-1, 2)
    opt.learning_rate = np.float32(0.25)
    opt.minimize(gives(1.0))
    assert w.value == -1.25


@pytest.mark.any_size
def test_bad_groups_are_refused_by_all(comm, rank, size):
    everybody = list(range(size))
    bad = [
        [[]],
        [everybody, [0]],
        [[0, *everybody]],
        [everybody[1:], []],
        [[size, *everybody[1:]]],
        [[0.5, *everybody[1:]]],
        [tuple(everybody)],
        np.array([everybody]),
        7,
    ]
    if size > 2:
        bad += [[everybody[:1], everybody[1:]], [everybody[:-1]]]
    for groups in bad:
        mine = groups if rank == size - 1 else [everybody]
        error = raised(
            hpc.CrossShardOptimizer, hpc.SGD(1), group_assignment=mine, comm=comm
        )
        assert type(error) is InvalidArgumentError, groups
        assert "group" in str(error)

"""CrossShardOptimizer: scaling, sums, groups, and gradients of None."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Reduction

from .training import cross_shard_fixture, gives, variable  # noqa: F401


def shards(size):
    """Return an assignment for each size of groups, with the ranks out of order."""
    ranks = [*range(size)[::-2], *range(size)[-2::-2]]
    return [
        [ranks[i : i + width] for i in range(0, size, width)]
        for width in range(1, size + 1)
        if size % width == 0
    ]


# Scaling in compute_gradients


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


# Sums


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


# Gradients of None


def test_none_on_all_ranks_passes(make):
    w, v = variable(name="w"), variable(name="v")
    opt = make(inner=hpc.Momentum(1, 0.5))
    for _ in range(3):
        opt.minimize(gives(1.0, None), var_list=[w, v])

    assert v.value == 0
    assert opt.get_slot(v, "momentum") is None
    np.testing.assert_allclose(w.value, -1 - 1.5 - 1.75, rtol=1e-15)


# Subclasses


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

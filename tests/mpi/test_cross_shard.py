"""CrossShardOptimizer: scaling, sums, groups, and gradients of None."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import (
    DisagreementError,
    InvalidArgumentError,
    Reduction,
)

from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401


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


def test_a_group_scales_by_its_own_size(make, size):
    for groups in shards(size):
        [(grad, _)] = make(groups=groups).compute_gradients(gives(12.0), [variable()])

        assert grad == 12 * (1 / len(groups[0]))


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


def test_a_loss_of_one_rank_that_gives_no_gradients_fails_on_all(make, rank, size):
    w, opt = variable(), make()
    opt.initialize([w])
    wrong = rank == size - 1
    loss = gives(np.ones((2, 2)) if wrong else np.ones(()))

    def in_two_calls(loss):
        opt.apply_gradients(opt.compute_gradients(loss))

    for call in (opt.minimize, in_two_calls):
        error = raised(call, loss)
        assert type(error) is InvalidArgumentError
        assert "shape" in str(error)
    assert w.value == 0
    opt.minimize(gives(float(rank)))
    np.testing.assert_allclose(w.value, -(size - 1) / 2, rtol=1e-6)


@pytest.mark.ranks(min=2)
def test_a_rank_that_skips_a_step_after_its_loss_has_raised_is_found(make, rank):
    w, opt = variable(), make()
    opt.initialize([w])
    opt.minimize(gives(1.0))

    def loss():
        raise KeyError("a bad batch")

    if rank == 1:
        assert type(raised(opt.minimize, loss)) is KeyError
    error = raised(opt.minimize, gives(2.0))
    assert type(error) is DisagreementError
    assert w.value == -1


def test_apply_sums_and_never_divides(make, size):
    w, opt = variable(), make()
    opt.apply_gradients([(2.0, w)])

    assert w.value == -2 * size


def test_loss_gradient_multiplies(make, size):
    [(grad, _)] = make().compute_gradients(gives(1.0), [variable()], grad_loss=5)

    assert grad == 5 * (1 / size)


def test_integer_gradients_are_scaled_as_numbers(make, size):
    w, opt = variable([0.0, 0.0], np.float32), make()
    opt.minimize(gives(np.array([1, 2])), var_list=[w])

    np.testing.assert_allclose(w.value, [-1, -2], rtol=1e-6)


# Sums


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
def test_minimize_equals_one_rank_with_all_gradients(make, rank, size, reduction):
    shapes = [(), (4,), (0,), (2, 3)]
    mine = [variable(np.ones(s), name=f"v{i}") for i, s in enumerate(shapes)]
    alone = [variable(np.ones(s), name=f"v{i}") for i, s in enumerate(shapes)]
    opt, plain = make(reduction, inner=hpc.Adam(0.25)), hpc.Adam(0.25)
    step = hpc.Variable(0, "step")

    def grads(r, call):
        random = np.random.default_rng([r, call])
        return [np.asarray(random.normal(size=shape)) for shape in shapes]

    for call in range(4):
        opt.minimize(gives(*grads(rank, call)), step, mine)
        sums = [
            sum(parts)
            for parts in zip(*(grads(r, call) for r in range(size)), strict=True)
        ]
        share = 1 / size if reduction == Reduction.MEAN else 1
        plain.minimize(gives(*(share * total for total in sums)), var_list=alone)

    assert step.value == 4
    for found, expected in zip(mine, alone, strict=True):
        np.testing.assert_allclose(found.value, expected.value, 1e-11, 1e-12)


def test_groups_in_any_order_sum_apart(make, rank, size):
    for groups in shards(size):
        w, opt = variable(), make(groups=groups)
        opt.apply_gradients([(2.0**rank, w)])

        mine = next(ranks for ranks in groups if rank in ranks)
        assert w.value == -sum(2.0**r for r in mine)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_half_precision_is_summed_in_single(make, rank, size, dtype):
    # In half precision 60000 + 60000 overflows, and 256 + 1 is 256.
    first, rest = (60000, 60000) if dtype == np.float16 else (256, 1)
    w, opt = variable([0.0], dtype), make(Reduction.SUM, inner=hpc.SGD(1 / size))
    opt.apply_gradients([(np.array([rest if rank else first], dtype), w)])

    mean = np.float32((first + rest * (size - 1)) / size)
    assert w.dtype == dtype
    assert w.value == -mean.astype(dtype)


def test_variables_of_several_dtypes_go_together(make, size):
    kinds = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    variables = [variable([1.0], kind, str(kind)) for kind in kinds]
    make().minimize(gives(*(np.ones(1, kind) for kind in kinds)), var_list=variables)

    for var, kind in zip(variables, kinds, strict=True):
        assert var.dtype == kind
        np.testing.assert_allclose(var.value.astype(float), [0], atol=1e-2)


def test_groups_inside_of_a_part_of_the_ranks(comm, rank, size):
    part = comm.Split(rank % 2, -rank)
    w = variable()
    with hpc.CrossShardOptimizer(hpc.SGD(1), comm=part) as opt:
        opt.minimize(gives(float(rank)), var_list=[w])
    part.Free()

    mine = range(rank % 2, size, 2)
    np.testing.assert_allclose(w.value, -sum(mine) / len(mine), rtol=1e-15)


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


@pytest.mark.ranks(min=2)
def test_none_on_some_ranks_is_an_error_on_all(make, rank, size):
    w, v = variable(name="w"), variable(name="v")
    opt, step = make(), hpc.Variable(0, "step")
    grads = (1.0, 1.0) if rank else (1.0, None)
    error = raised(opt.minimize, gives(*grads), step, [w, v])
    opt.minimize(gives(1.0, 2.0), step, [w, v])

    assert type(error) is DisagreementError
    assert "gradient of v must be the same" in str(error)
    assert step.value == 1
    np.testing.assert_allclose([w.value, v.value], [-1, -2], rtol=1e-15)


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
def test_minimize_divides_early_only_if_a_call_is_overridden(
    comm, size, kind, monkeypatch
):
    w, kinds = variable(), []
    with kind(hpc.SGD(1), comm=comm) as opt:
        opt.initialize([w])
        reduce = opt._shard.reducer.reduce

        def watched(*args, reduction_type, **kwargs):
            kinds.append(reduction_type)
            return reduce(*args, reduction_type=reduction_type, **kwargs)

        monkeypatch.setattr(opt._shard.reducer, "reduce", watched)
        opt.minimize(gives(8.0))

    assert w.value == -16 if kind is Doubling else w.value == -8
    assert kinds == ["MEAN" if kind is hpc.CrossShardOptimizer and size > 1 else "SUM"]
    if kind is Watching:
        assert opt.seen == [8 * (1 / size)]


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
def test_a_loss_may_compute_other_gradients(make, rank, size, reduction):
    w, opt = variable(), make(reduction)
    found = []

    def loss():
        [(grad, _)] = opt.compute_gradients(gives(8.0), [w])
        found.append(grad)
        return gives(float(rank))()

    opt.minimize(loss, var_list=[w])
    opt.minimize(loss)

    share = 1 / size if reduction == Reduction.MEAN else 1
    assert found == [8.0 * share] * 2
    np.testing.assert_allclose(w.value, -2 * sum(range(size)) * share)


def test_minimize_calls_what_was_set_on_the_instance(make, size, monkeypatch):
    w, opt = variable(), make()
    compute, seen = opt.compute_gradients, []

    def watched(*args, **kwargs):
        seen.extend(pairs := compute(*args, **kwargs))
        return pairs

    monkeypatch.setattr(opt, "compute_gradients", watched)
    opt.minimize(gives(8.0), var_list=[w])

    assert seen == [(8 * (1 / size), w)]

"""Optimizers with weights: ranks with different amounts of data."""

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive
from ..common import same_bits
from .training import ONE_SIDED, WRAPPERS, gives, meet, raised, turns, variable

WEIGHTS = (32.0, 8.0, 0.5, 2.0)
STEPS = 3


def drawn(rank, step):
    rng = np.random.default_rng([rank, step])
    return {"w": rng.integers(-16, 17, 5).astype(np.float64)}


# Batches of different length


def batches(size):
    """Return the data of each rank: 32 and 8 samples, and maybe 24 and 3."""
    rng = np.random.default_rng(0)
    lengths = [32, 8, 24, 3][:size]
    return [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in lengths]


def gradient(w, data):
    """Return the gradient of the mean squared error."""
    x, y = data
    return 2 / len(y) * x.T @ (x @ w - y)


def of_one_process(size):
    """Return the weights after some steps with the data of all ranks."""
    parts = batches(size)
    data = [np.concatenate(each) for each in zip(*parts, strict=True)]
    w = np.zeros(3)
    for _ in range(STEPS):
        w -= 0.1 * gradient(w, data)
    return w


def check_batches(comm, rank, size, name):
    """Compare steps with batches of different length with those of one process."""
    w, data = variable(np.zeros(3)), batches(size)[rank]
    with WRAPPERS[name](hpc.SGD(0.1), [w], comm) as opt:
        for _ in range(STEPS):
            opt.minimize(
                lambda: (0.0, [gradient(w.value, data)]),
                var_list=[w],
                weight=len(data[1]),
            )
    np.testing.assert_allclose(w.value, of_one_process(size), 1e-12)


@pytest.mark.own_comm
@pytest.mark.parametrize("name", ["CrossShard", "SyncReplicas"])
def test_batches_of_different_length_are_as_one(comm, rank, size, name):
    check_batches(comm, rank, size, name)


@pytest.mark.own_comm
@pytest.mark.parametrize("name", ["CrossShard", "SyncReplicas"])
def test_they_are_as_one_on_several_nodes(group, rank, size, name):
    check_batches(group, rank, size, name)


# CrossShard


def in_one_call(opt, w, grad, weight):
    return opt.minimize(gives(grad), var_list=[w], weight=weight)


def in_two_calls(opt, w, grad, weight):
    pairs = opt.compute_gradients(gives(grad), [w])
    return opt.apply_gradients(pairs, weight=weight)


@pytest.mark.parametrize("step", [in_one_call, in_two_calls])
@pytest.mark.parametrize("reduction", [hpc.Reduction.MEAN, hpc.Reduction.SUM])
def test_cross_shard_updates_with_the_weighted_mean(comm, rank, size, step, reduction):
    w, kind = variable(np.zeros(5)), "MEAN" if "mean" in reduction else "SUM"
    expected = np.zeros(5)
    with hpc.CrossShardOptimizer(hpc.SGD(1), reduction, comm=comm) as opt:
        for call in range(STEPS):
            assert step(opt, w, drawn(rank, call)["w"], WEIGHTS[rank])
            parts = [drawn(each, call)["w"] for each in range(size)]
            expected -= naive.allreduce(parts, kind, WEIGHTS[:size])
            np.testing.assert_allclose(w.value, expected, 1e-13)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("step", [in_one_call, in_two_calls])
def test_a_gradient_that_is_dropped_has_no_weight(comm, rank, size, step):
    w = variable(np.zeros(5))
    options = {"on_nonfinite": "drop", "comm": comm}
    with hpc.CrossShardOptimizer(hpc.SGD(1), **options) as opt:
        grad = drawn(rank, 0)["w"] if rank else np.full(5, np.nan)
        step(opt, w, grad, WEIGHTS[rank])
        parts = [drawn(each, 0)["w"] for each in range(1, size)]
        expected = -naive.allreduce(parts, weights=WEIGHTS[1:size])
        np.testing.assert_allclose(w.value, expected, 1e-13)


@pytest.mark.parametrize("step", [in_one_call, in_two_calls])
@pytest.mark.parametrize("rows", [3, 200])
def test_rows_count_with_the_weight_of_their_rank(comm, rank, size, step, rows):
    w = hpc.Variable(np.zeros((rows + 1, 2)), "w", sparse=True)
    with hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm) as opt:
        for _ in range(2):
            values = np.full((rank + rows - 2, 2), 2.0**rank)
            grad = hpc.IndexedSlices(values, np.arange(len(values)), w.shape)
            step(opt, w, grad, WEIGHTS[rank])
    expected = np.zeros(rows + 1)
    for each in range(size):
        expected[: each + rows - 2] -= 2 * WEIGHTS[each] * 2.0**each
    np.testing.assert_allclose(w.value[:, 1], expected / sum(WEIGHTS[:size]), 1e-13)


@pytest.mark.parametrize("weight", [0, np.nan, "1", True])
def test_what_is_no_weight_is_an_error_of_all_ranks(comm, rank, weight):
    w = variable(np.zeros(5))
    with hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm) as opt:
        opt.initialize([w])
        mine = 2.0 if rank else weight
        error = raised(opt.minimize, gives(np.ones(5)), weight=mine)
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "weight must be a finite number above 0" in str(error)
        opt.minimize(gives(np.ones(5)), weight=2)
        same_bits(w.value, -np.ones(5))


# With a server


@pytest.mark.parametrize("sparse", [False, True])
def test_sync_replicas_updates_with_the_weighted_mean(comm, rank, size, sparse):
    w = hpc.Variable(np.zeros((5, 1)), "w", sparse=sparse)
    server = naive.SyncReplicas({"w": np.zeros((5, 1))}, naive.Momentum(1), size)
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm) as opt:
        opt.initialize([w])
        for call in range(STEPS):
            grad = drawn(rank, call)["w"][:, None]
            if sparse:
                grad = hpc.IndexedSlices(grad, np.arange(5), w.shape)
            assert opt.minimize(gives(grad), weight=WEIGHTS[rank])
            for each in range(size):
                given = {"w": drawn(each, call)["w"][:, None]}
                assert server.push(given, call, WEIGHTS[each])
            np.testing.assert_allclose(w.value, server.values["w"], 1e-13)


def test_a_variable_without_a_gradient_has_no_weight(comm, rank, size):
    both = [variable(np.zeros(2), name=name) for name in "ab"]
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm) as opt:
        opt.initialize(both)
        grads = [np.full(2, 2.0), np.full(2, 2.0) if rank == 0 else None]
        opt.minimize(gives(*grads), weight=WEIGHTS[rank])
        for var in both:
            np.testing.assert_allclose(var.value, -2.0)


@pytest.mark.parametrize("name", ["DropStale", "AGN"])
def test_a_weight_multiplies_a_gradient_that_is_an_update(comm, rank, size, name):
    w, start = variable(np.ones(5)), {"w": np.ones(5)}
    server = naive.DropStale(start, naive.Momentum(0.5), 10**6)
    workers = [naive.AGNWorker(server, naive.Momentum(0.5), 2) for _ in range(size)]
    with ONE_SIDED[name](hpc.SGD(0.5), [w], comm) as opt:
        opt.initialize([w])

        def act(turn):
            return opt.minimize(gives(drawn(rank, turn)["w"]), weight=WEIGHTS[rank])

        order = [turn % size for turn in range(4 * size)]
        receipts = turns(order, act)
        for turn, each in enumerate(order):
            if name == "AGN":
                workers[each].step(drawn(each, turn), WEIGHTS[each])
            else:
                step = receipts[turn].local_step
                assert server.push(drawn(each, turn), step, WEIGHTS[each])
    np.testing.assert_allclose(w.value, server.values["w"], 1e-12)


@pytest.mark.parametrize("name", ONE_SIDED)
@pytest.mark.parametrize("weight", [0, np.inf, None, True])
def test_what_is_no_weight_is_refused_on_this_rank(comm, name, weight):
    w = variable(np.zeros(5))
    with ONE_SIDED[name](hpc.SGD(1), [w], comm) as opt:
        opt.initialize([w])
        with pytest.raises(hpc.InvalidArgumentError, match="weight must be a finite"):
            opt.minimize(gives(np.ones(5)), weight=weight)
        meet()
        assert opt.global_step == 0
        assert sum(opt.statistics().accepted) == 0
        meet()


def test_a_local_optimizer_has_no_weight():
    w = variable(np.zeros(5))
    with pytest.raises(TypeError, match="weight"):
        hpc.SGD(1).minimize(gives(np.ones(5)), var_list=[w], weight=2)

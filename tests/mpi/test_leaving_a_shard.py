"""Ranks of a CrossShardOptimizer that run out of data before others."""

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Reduction

from ..common import every_pair
from .acting import meet
from .expiring import missed_by
from .training import gives, raised, started, variable


def uneven(opt, w, rank, count):
    """Apply ``count`` gradients, then leave; return the losses of the receipts."""
    receipts = []
    for step in range(count):
        loss = step, [np.full(w.shape, rank + 1.0)]
        receipts.append(opt.minimize(lambda loss=loss: loss, var_list=[w]))
    opt.leave()
    return receipts


def expected(size, counts, mean=True):
    """Return the sum of all updates, of gradients ``rank + 1``."""
    total = 0.0
    for step in range(max(counts)):
        grads = [r + 1.0 for r in range(size) if counts[r] > step]
        total += sum(grads) / (len(grads) if mean else 1)
    return total


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
@pytest.mark.parametrize("order", ["first", "last", "two at once", "all at once"])
def test_the_others_go_on_with_the_mean_over_those_that_remain(
    comm, rank, size, order, reduction
):
    counts = {
        "first": [1 + r for r in range(size)],
        "last": [size - r for r in range(size)],
        "two at once": [2 + r // 2 for r in range(size)],
        "all at once": [3] * size,
    }[order]
    w = variable(np.zeros(3))
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), reduction, comm=comm) as opt:
        receipts = uneven(opt, w, rank, counts[rank])
        own = opt.global_step

    assert [(r.accepted, r.lag, r.global_step, r.loss) for r in receipts] == [
        (True, 0, step, step) for step in range(counts[rank])
    ]
    assert own == counts[rank]
    assert opt.global_step == max(counts)
    mean = reduction == Reduction.MEAN
    np.testing.assert_allclose(w.value, -expected(size, counts, mean), rtol=1e-12)
    assert len(set(meet(w.value.tobytes()))) == 1
    assert opt.statistics() == hpc.Tally(
        tuple(counts), (0,) * size, {0: sum(counts)}, (0,) * size
    )


def test_gradients_computed_before_a_rank_left_are_divided_rightly(comm, rank, size):
    w = variable(np.zeros(2))
    with started(hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm), [w]) as opt:
        if rank == 0:
            opt.leave()
        else:
            # Divided by the number of ranks, of which one then leaves.
            pairs = opt.compute_gradients(gives(np.full(2, 6.0)))
            opt.apply_gradients(pairs)
            pairs = opt.compute_gradients(gives(np.full(2, 6.0)))
            np.testing.assert_allclose(pairs[0][0], 6 / (size - 1))
            opt.apply_gradients(pairs)
            opt.leave()

    np.testing.assert_allclose(w.value, -12.0 if size > 1 else 0.0, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_gradients_in_the_exchange_s_memory_survive(comm, rank, size, dtype):
    w = variable(np.zeros(5), dtype)

    def loss():
        arrays = opt.gradient_arrays()
        arrays["w"][...] = rank + 1
        return 0.0, arrays

    with started(hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm), [w]) as opt:
        for _ in range(2 if rank else 1):
            opt.minimize(loss)
        opt.leave()

    counts = [1] + [2] * (size - 1)
    np.testing.assert_allclose(
        w.value.astype(float), -expected(size, counts), rtol=2e-2
    )


def test_groups_leave_independently(comm, rank, size):
    groups = [[r for r in range(size) if r % 2 == odd] for odd in range(2)]
    if size % 2:
        groups = [[r] for r in range(size)]
    w = variable(np.zeros(2))
    with hpc.CrossShardOptimizer(
        hpc.SGD(1.0), group_assignment=groups, comm=comm
    ) as opt:
        uneven(opt, w, rank, 1 + rank)
    own = next(group for group in groups if rank in group)

    assert opt.global_step == 1 + max(own)
    assert opt.statistics().accepted == tuple(1 + r for r in own)


def test_a_rank_that_left_can_apply_no_more(comm, rank):
    w = variable(np.zeros(2))
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), name="mine", comm=comm) as opt:
        uneven(opt, w, rank, 1)
        opt.leave()
        errors = [
            raised(opt.minimize, gives(np.ones(2)), var_list=[w]),
            raised(opt.apply_gradients, [(np.ones(2), w)]),
        ]
        assert w.value[0] != 0
        w.value[...] = 0

    assert {str(error) for error in errors} == {
        f"mine: rank {rank} has left and can apply no more gradients"
    }
    assert {type(error) for error in errors} == {hpc.InvalidArgumentError}


@pytest.mark.ranks(min=2)
def test_an_error_of_another_rank_comes_before_leaving(comm, rank, size):
    w = variable(np.zeros(2))
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), name="mine", comm=comm) as opt:
        opt.initialize([w])
        if rank == 0:
            error = raised(opt.leave)
        else:
            bad = np.ones(3 if rank == 1 else 2)
            error = raised(opt.apply_gradients, [(bad, w)])
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "rank 1" in str(error) or rank == 1
        assert not w.value.any()
        # Nobody has left: all go on.
        opt.minimize(gives(np.ones(2)))
        opt.leave()

    assert opt.statistics().accepted == (1,) * size


@pytest.mark.own_comm
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("which", "schedule", "call"),
    every_pair(["first", "last"], ["auto", "flat"], ["free", "another"]),
)
def test_a_rank_that_ends_its_loop_early_is_told_to_leave(
    comm, rank, size, which, schedule, call, impatient
):
    w, early = variable(np.zeros(3)), 0 if which == "first" else size - 1
    opt = hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm, schedule=schedule)
    opt.initialize([w])
    opt.minimize(gives(np.ones(3)))
    act = opt.free if call == "free" else lambda: opt.restore(None)
    error = raised(act) if rank == early else raised(opt.minimize, gives(np.ones(3)))

    assert type(error) is hpc.DisagreementError
    assert str(error).startswith("ranks make different calls: ")
    assert str(error).endswith("; call leave() when a rank has no more data")


@pytest.mark.own_comm
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["auto", "flat"])
def test_a_wait_for_a_rank_that_did_not_leave_says_so(comm, rank, size, schedule):
    w = variable(np.zeros(3))
    opt = hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm, schedule=schedule)
    opt.initialize([w])
    error = missed_by(size - 1, comm, opt.minimize, gives(np.ones(3)))

    if rank != size - 1:
        assert type(error) is hpc.WaitTimeoutError
        text = (
            f"for rank {size - 1} of {size} to make the same call; call leave() when "
        )
        assert str(error).endswith(text + "a rank has no more data")

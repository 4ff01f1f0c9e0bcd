"""SyncReplicasOptimizer: quorums, backups, shares, and ranks that leave."""

import time

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from .support import for_some_pause
from .training import gives, meet, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def make(make_one):
    kind = hpc.SyncReplicasOptimizer
    return lambda quorum, own, inner=None, **options: make_one(
        kind, inner or hpc.SGD(1), quorum, variables=own, **options
    )


@pytest.mark.ranks(min=2)
def test_all_that_are_there_are_in_the_mean(comm, rank, size):
    w = variable()
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), 1, comm=comm, dedicated=True) as opt:
        opt.initialize([w])
        if rank:
            internals.push(opt, {"w": np.array(float(rank))}, 0)
        meet()
        opt.leave() if rank else opt.serve()
    assert w.value == -size / 2
    assert opt.global_step == 1


def test_a_quorum_of_two_each(make, rank, size):
    w = variable()
    opt, steps = make(2 * size, [w]), []
    for call in range(6):
        meet()
        receipt = opt.minimize(gives(float(call)))
        steps.append((receipt.accepted, receipt.global_step, float(w.value)))

    # The first of two calls returns at once.
    means = [-0.5, -3, -7.5]
    assert steps[1::2] == [(True, k, mean) for k, mean in enumerate(means)]
    assert steps[0::2] == [(True, k, m) for k, m in enumerate([0, *means[:2]])]


def test_a_share_is_of_one_step(make, rank, size):
    # A rank that had contributed less than its share when the step passed, and did not
    # wait, owes a whole share again; otherwise all the others would wait.
    def slowly():
        time.sleep(0.05)
        return 1.0

    quorum, w = 3 * size - 1, variable()
    opt, last = make(quorum, [w], hpc.SGD(slowly)), rank == size - 1
    for call in range(3):
        if last:
            while sum(opt.statistics().accepted) < quorum * call + 3 * (size - 1):
                time.sleep(0)
        for _ in range(3 if not last else 2):
            assert opt.minimize(gives(1.0))
        while opt.global_step <= call:
            time.sleep(0.001)
        meet()

    assert opt.statistics().dropped == (0,) * size
    assert opt.center(w) == -3


@pytest.mark.ranks(min=2)
def test_waiting_is_counted_on_those_who_wait(make, rank, size):
    w = variable()
    opt = make(size, [w])
    opt.minimize(gives(1.0))

    def waits_for_rank_0(seconds):
        before = opt.waited
        meet()
        time.sleep(seconds * (rank == 0))
        opt.minimize(gives(1.0))
        return rank == 0 or opt.waited - before > seconds / 2

    assert for_some_pause(waits_for_rank_0)


def test_a_gradient_of_none_is_left_out_of_the_mean(make, rank, size):
    w, v, u = variable(name="w"), variable(name="v"), variable(5.0, name="u")
    opt = make(size, [w, v, u])
    # Nor does the weight of a rank without a gradient count.
    opt.minimize(gives(3.0, 3.0 if rank == 0 else None, None), weight=rank + 2)

    np.testing.assert_allclose([w.value, v.value, u.value], [-3, -3, 5], rtol=1e-14)


def test_the_number_of_replicas_is_only_checked(make, comm, size):
    w = variable()
    make(size, [w], total_num_replicas=17).minimize(gives(1.0))

    assert w.value == -1


@pytest.mark.ranks(min=2)
def test_a_round_whose_gradients_are_lost_is_an_empty_update(make, rank):
    # Its step may be known before: ranks wait for it.
    w = variable()
    opt = make(1, [w])
    opt.minimize(gives(-1.0))
    meet()
    before = opt.global_step
    opt.compute_gradients(gives(-1.0))
    # What writes gradients itself; those of other nodes are in place when admitted.
    host = rank == 0

    def fail():
        # The round is closed.
        meet()
        meet()
        raise MemoryError

    meet()
    if host:
        with internals.before_records(opt, fail), pytest.raises(MemoryError):
            opt.apply_gradients([(np.float64(-1), w)])
        opt.leave()
    else:
        meet()
        assert not opt.apply_gradients([(np.float64(-1), w)])
        meet()
        assert opt.minimize(gives(-1.0)) is not None
        assert internals.own_step(opt) > before
    meet()
    opt.free()

"""SyncReplicasOptimizer: quorums, backups, shares, and ranks that leave."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, testing

from .support import WAIT, for_some_pause
from .training import Gate, computed, gives, meet, raised, turns, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def make(comm):
    """Return a function that makes an optimizer; all are freed after the test."""
    made = []

    def make(quorum, variables, inner=None, **options):
        inner = hpc.SGD(1) if inner is None else inner
        optimizer = hpc.SyncReplicasOptimizer(inner, quorum, comm=comm, **options)
        optimizer.initialize(variables)
        made.append(optimizer)
        return optimizer

    yield make
    for optimizer in made:
        optimizer.free()


# All replicas


def test_all_start_with_the_values_of_the_host(make, rank, size):
    w = variable([rank, 7.0])
    make(size, [w], host=size - 1)

    assert w.value.tolist() == [size - 1, 7]


def test_the_order_of_arrival_does_not_change_a_bit(make, rank, size):
    results = set()
    for shift in range(3):
        w = variable(np.zeros(50, np.float32), np.float32)
        opt = make(size, [w])
        grad = np.random.default_rng(rank).normal(size=50).astype(np.float32)
        pairs = opt.compute_gradients(gives(grad))
        # Each rank of this order waits until those before it are admitted.
        turn = (rank + shift) % size
        while sum(opt.statistics().accepted) < turn:
            time.sleep(0)
        opt.apply_gradients(pairs)
        results |= set(meet(w.value.tobytes()))

    assert len(results) == 1


# Backups


@pytest.mark.ranks(min=2)
def test_backups_are_dropped_and_do_not_wait(make, rank, size):
    quorum, w, step = size - 1, variable(), hpc.Variable(0, "step")
    opt = make(quorum, [w])
    pairs = computed(opt, float(rank + 1))
    receipt = opt.apply_gradients(pairs, step) if rank < quorum else None
    meet()
    if rank == quorum:
        # No other rank contributes any more: waiting would never end.
        receipt = opt.apply_gradients(pairs, step)
    receipts = meet(receipt)

    assert receipts == [hpc.Receipt(True, 0, 0)] * quorum + [hpc.Receipt(False, 0, 1)]
    assert step.value == opt.global_step == 1
    np.testing.assert_allclose(w.value, -(quorum + 1) / 2, rtol=1e-15)
    assert opt.statistics().dropped == (*[0] * quorum, 1)
    assert opt.statistics().lags == {0: quorum, 1: 1}


@pytest.mark.ranks(min=2)
def test_after_a_drop_gradients_are_fresh_again(make, rank, size):
    w = variable()
    opt = make(1, [w])
    pairs = computed(opt, 8.0)
    meet()  # no update before all have computed
    turns([0] * 3, lambda _: opt.minimize(gives(1.0)))
    [dropped] = turns([size - 1], lambda _: opt.apply_gradients(pairs))
    [fresh] = turns([size - 1], lambda _: opt.minimize(gives(1.0)))

    assert dropped == hpc.Receipt(False, 0, 3)
    assert fresh == hpc.Receipt(True, 3, 3)
    assert opt.center(w) == -4


def test_a_quorum_of_one_takes_every_gradient(make, rank, size):
    w = variable()
    opt, calls = make(1, [w]), 20
    accepted = sum(bool(opt.minimize(gives(1.0))) for _ in range(calls))
    total = sum(meet(accepted))

    # All that are there when an update begins are in its mean.
    assert 1 <= opt.global_step <= total
    assert -opt.center(w) == opt.global_step


@pytest.mark.ranks(min=2)
def test_a_fast_worker_may_contribute_more_than_its_part(make, size):
    w = variable()
    opt = make(1, [w])
    turns([size - 1] * 4, lambda _: opt.minimize(gives(1.0)))

    assert opt.global_step == 4
    assert opt.statistics().accepted == (*[0] * (size - 1), 4)


@pytest.mark.ranks(min=2)
def test_all_that_are_there_are_in_the_mean(comm, rank, size):
    w = variable()
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), 1, comm=comm, dedicated=True) as opt:
        opt.initialize([w])
        if rank:
            testing.push(opt, {"w": np.array(float(rank))}, 0)
        meet()
        opt.leave() if rank else opt.serve()
    assert w.value == -size / 2
    assert opt.global_step == 1


# A quorum larger than the number of workers


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


# Leaving and waiting


@pytest.mark.ranks(min=2)
def test_quorums_shrink_when_a_rank_leaves(make, rank, size):
    w = variable()
    opt = make(size, [w])
    opt.minimize(gives(1.0))
    if rank == size - 1:
        opt.leave()
    else:
        for _ in range(3):
            opt.minimize(gives(1.0))
    meet()

    assert opt.global_step == 4
    assert opt.center(w) == -4


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


def test_readers_see_no_update_before_it_is_complete(make, rank, size):
    gate = threading.Event()
    w = variable()
    opt = make(1, [w], Gate(lambda: gate.wait(WAIT)))
    seen = []
    thread = None
    if rank == 0:
        pairs = opt.compute_gradients(gives(1.0))
        thread = threading.Thread(target=opt.apply_gradients, args=(pairs,))
        thread.start()
        while not sum(opt.statistics().accepted):
            time.sleep(0.001)
    meet()
    seen.append((opt.global_step, float(opt.center(w))))
    meet()
    gate.set()
    if thread:
        thread.join(WAIT)
    meet()
    seen.append((opt.global_step, float(opt.center(w))))

    assert seen == [(0, 0), (1, -1)]


def test_a_gradient_of_none_is_left_out_of_the_mean(make, rank, size):
    w, v, u = variable(name="w"), variable(name="v"), variable(5.0, name="u")
    opt = make(size, [w, v, u])
    opt.minimize(gives(3.0, 3.0 if rank == 0 else None, None))

    np.testing.assert_allclose([w.value, v.value, u.value], [-3, -3, 5], rtol=1e-14)


# Arguments


@pytest.mark.parametrize(
    ("quorum", "kind"),
    [
        (0, InvalidArgumentError),
        (-1, InvalidArgumentError),
        (1 << 20, InvalidArgumentError),
        ([1], InvalidArgumentError),
        (1.0, TypeError),
        ("1", TypeError),
    ],
)
def test_a_quorum_that_is_no_number_of_gradients_is_refused_on_all_ranks(
    comm, rank, size, quorum, kind
):
    mine = quorum if rank == size - 1 else 1
    error = raised(hpc.SyncReplicasOptimizer, hpc.SGD(1), mine, comm=comm)

    assert type(error) is kind
    assert "replicas_to_aggregate" in str(error)


def test_the_number_of_replicas_is_only_checked(make, comm, size):
    w = variable()
    make(size, [w], total_num_replicas=17).minimize(gives(1.0))
    error = raised(hpc.SyncReplicasOptimizer, hpc.SGD(1), 1, 0, comm=comm)

    assert w.value == -1
    assert type(error) is InvalidArgumentError
    assert "total_num_replicas" in str(error)


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
        with testing.before_records(opt, fail), pytest.raises(MemoryError):
            opt.apply_gradients([(np.float64(-1), w)])
        opt.leave()
    else:
        meet()
        assert not opt.apply_gradients([(np.float64(-1), w)])
        meet()
        assert opt.minimize(gives(-1.0)) is not None
        assert testing.own_step(opt) > before
    meet()
    opt.free()

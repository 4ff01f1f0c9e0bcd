"""Every strategy against its naive version, with a large array.

Gradients are small whole numbers: their sums are exact in any order, so results must
have the bits of the naive version wherever the ranks are.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive, soak
from ..common import check_error, same_bits
from .training import WRAPPERS, gives, meet, raised, started

SHAPES = {"scalar": (), "empty": (0, 3), "matrix": (7, 5), "large": (150_000,)}
CALLS = 4


def weight(rank, call):
    """Return that of a gradient, which is 1 in the first calls."""
    return (32.0, 8.0, 0.5, 2.0)[rank] if call > 1 else 1.0


def drawn(rank, call):
    random = np.random.default_rng([rank, call])
    return {
        name: np.asarray(random.integers(-8, 9, shape), np.float32)
        for name, shape in SHAPES.items()
    }


def weighted(rank, call):
    factor = weight(rank, call)
    return {n: naive.weighted(each, factor) for n, each in drawn(rank, call).items()}


def ones():
    return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}


def rule():
    """Of which only additions round."""
    return naive.Momentum(0.25, 0.5)


def check(found, expected):
    for name, array in zip(SHAPES, found, strict=True):
        same_bits(array, expected[name])


@pytest.fixture
def train(comm):
    """Make an optimizer with gradients of this rank; end with the final variables."""

    @contextlib.contextmanager
    def train(wrap):
        own = [hpc.Variable(array, name) for name, array in ones().items()]
        with started(wrap(hpc.Momentum(0.25, 0.5), own, comm), own) as opt:
            yield Training(opt, own, comm.rank)

    return train


class Training(NamedTuple):
    """The optimizer of one test and its variables."""

    opt: Any
    variables: list[hpc.Variable]
    rank: int

    def step(self, call):
        loss, own = (0.0, drawn(self.rank, call)), weight(self.rank, call)
        return self.opt.minimize(lambda: loss, var_list=self.variables, weight=own)

    def values(self):
        return [variable.value for variable in self.variables]


def test_cross_shard_is_an_allreduce(train, rank, size):
    replicas, rules = [ones() for _ in range(size)], [rule() for _ in range(size)]
    with train(WRAPPERS["CrossShard"]) as training:
        for call in range(CALLS):
            training.step(call)
            gradients = [drawn(r, call) for r in range(size)]
            weights = [weight(r, call) for r in range(size)]
            naive.cross_shard(replicas, rules, gradients, weights)
            check(training.values(), replicas[rank])


def quorum_of(quorum):
    return lambda inner, _, comm: hpc.SyncReplicasOptimizer(inner, quorum, comm=comm)


@pytest.mark.parametrize("backups", [0, 1])
def test_sync_replicas_takes_the_mean_of_a_quorum(train, rank, size, backups):
    quorum = max(size - backups, 1)
    server = naive.SyncReplicas(ones(), rule(), quorum)
    with train(quorum_of(quorum)) as training:
        for call in range(CALLS):
            chosen = sorted((call + n) % size for n in range(quorum))
            while rank in chosen and not training.step(call):
                pass  # it was computed with old parameters
            meet()
            for r in chosen:
                assert server.push(drawn(r, call), call, weight(r, call))
            check(training.opt.center(training.variables), server.values)
            meet()  # no update before all have compared

    check(training.values(), server.values)


def halved(lag):
    return 0.5**lag


@pytest.mark.parametrize(
    ("staleness", "lateness"), [(1, None), (100, None), (100, halved)]
)
def test_drop_stale_updates_with_each_gradient_in_time(train, staleness, lateness):
    def wrap(inner, _, comm):
        return hpc.DropStaleGradientOptimizer(
            inner, staleness, lateness=lateness, comm=comm
        )

    with train(wrap) as training:
        receipts = meet([training.step(call) for call in range(CALLS)])

    factor = lateness or (lambda lag: 1.0)
    server = naive.DropStale(ones(), rule(), staleness, factor)
    for r, call, receipt in in_order(receipts):
        assert receipt.factor == factor(receipt.lag)
        assert server.push(drawn(r, call), receipt.local_step, weight(r, call))
    check(training.values(), server.values)


def test_agn_updates_with_the_mean_of_each_period(train):
    with train(WRAPPERS["AGN"]) as training:
        receipts = meet([training.step(call) for call in range(CALLS)])

    server = naive.DropStale(ones(), rule(), np.inf)
    for r, call, receipt in in_order(receipts):
        both = [weighted(r, each) for each in (call - 1, call)]
        assert server.push(naive.mean(both), receipt.local_step)
    check(training.values(), server.values)


def local_steps_of(quorum, **options):
    def wrap(inner, _, comm):
        outer = hpc.Momentum(0.5, 0.25)
        return hpc.LocalStepsOptimizer(
            inner, outer, 2, quorum=quorum, comm=comm, **options
        )

    return wrap


def test_local_steps_update_with_the_mean_of_differences(train, size):
    with train(local_steps_of(size)) as training:
        for call in range(CALLS):
            assert training.step(call).sent == call % 2

    server = naive.SyncReplicas(ones(), naive.Momentum(0.5, 0.25), size)
    workers = [naive.LocalStepsWorker(server, rule(), 2) for _ in range(size)]
    # They wait for each other, and push in the order of ranks, as sums round.
    with ThreadPoolExecutor(size) as pool:
        for call in range(CALLS):
            steps = []
            for r, worker in enumerate(workers):
                steps.append(pool.submit(worker.step, weighted(r, call)))
                while call % 2 and r < size - 1 and len(server.round) <= r:
                    time.sleep(0.001)
            assert [step.result() for step in steps] == [call % 2] * size
    check(training.values(), server.values)


def test_local_steps_update_with_each_difference(train, size):
    with train(local_steps_of(None, lateness=halved)) as training:
        receipts = meet([training.step(call) for call in range(CALLS)])

    outer, rules = naive.Momentum(0.5, 0.25), [rule() for _ in range(size)]
    server = naive.DropStale(ones(), outer, np.inf, halved)
    centers = [server.pull()[0]]
    for r, call, receipt in in_order(receipts):
        center, (values, _) = centers[receipt.local_step], server.pull()
        for name in values:
            values[name][...] = center[name]
        for each in call - 1, call:
            rules[r](values, weighted(r, each))
        difference = {name: center[name] - values[name] for name in values}
        assert server.push(difference, receipt.local_step)
        centers.append(server.pull()[0])
    check(training.values(), server.values)


def in_order(receipts):
    """Return rank, call and receipt of each update, in the order of admission."""
    updates = [
        (receipt.global_step, rank, call, receipt)
        for rank, of_rank in enumerate(receipts)
        for call, receipt in enumerate(of_rank)
        if receipt and receipt.sent
    ]
    updates.sort(key=lambda update: update[0])
    assert [step for step, *_ in updates] == list(range(len(updates)))
    return [update[1:] for update in updates]


def batches(size):
    """Return the data of each rank: 32 and 8 samples, and maybe 24 and 3."""
    rng = np.random.default_rng(0)
    lengths = [32, 8, 24, 3][:size]
    return [(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in lengths]


def gradient(w, data):
    """Return the gradient of the mean squared error."""
    x, y = data
    return 2 / len(y) * x.T @ (x @ w - y)


@pytest.mark.own_comm
@pytest.mark.parametrize("name", ["CrossShard", "SyncReplicas"])
def test_batches_of_different_length_are_as_one(group, rank, size, name):
    parts, w, expected = batches(size), hpc.Variable(np.zeros(3), "w"), np.zeros(3)
    data = [np.concatenate(each) for each in zip(*parts, strict=True)]
    weight = len(parts[rank][1])

    def loss():
        return 0.0, [gradient(w.value, parts[rank])]

    with WRAPPERS[name](hpc.SGD(0.1), [w], group) as opt:
        for step in range(3):
            if step % 2:
                opt.apply_gradients(opt.compute_gradients(loss, [w]), weight=weight)
            else:
                opt.minimize(loss, var_list=[w], weight=weight)
            expected -= 0.1 * gradient(expected, data)
    np.testing.assert_allclose(w.value, expected, 1e-12)


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_no_weight_is_refused(comm, rank, name):
    w = hpc.Variable(np.zeros(5), "w")
    with started(WRAPPERS[name](hpc.SGD(1), [w], comm), [w]) as opt:
        for weight in (0, np.inf, "1", None, True):
            # With CrossShard, that of one rank is an error on all.
            mine = 2.0 if rank and name == "CrossShard" else weight
            error = raised(opt.minimize, gives(np.ones(5)), weight=mine)
            check_error(error, "weight must be a finite number above 0")
        meet()
        assert opt.global_step == sum(opt.statistics().accepted) == 0
        meet()
        if name == "CrossShard":
            opt.minimize(gives(np.ones(5)), weight=2)
            same_bits(w.value, -np.ones(5))
    with pytest.raises(TypeError, match="weight"):
        hpc.SGD(1).minimize(gives(np.ones(5)), var_list=[w], weight=2)


@pytest.mark.parametrize("kind", ["accumulator", "optimizer", "reducer", "all"])
def test_nothing_is_wrong_with_random_operations(comm, monkeypatch, kind):
    monkeypatch.setattr(soak, "_OPERATIONS", 40)
    if kind != "all":
        monkeypatch.setattr(soak, "_KINDS", (getattr(soak, kind),))
    assert soak.Soak(hpc.group_of(comm), 0.1, 1)() == 0

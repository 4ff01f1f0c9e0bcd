"""SyncReplicasOptimizer with lateness: late gradients join the next update."""

import numpy as np
import pytest

import hpcaccum as hpc

from .. import naive
from .training import gives, meet, started, turns, variable

SIZE = 3
# The factor of a gradient that is one step late.
LATE = 0.25


def quarter(lag):
    return LATE**lag


def drawn(rank, call):
    return np.random.default_rng([rank, call]).integers(-8, 8, SIZE) / 4


def play(comm, rank, size, *, sparse=False, **options):
    """Make updates without some ranks, which are late; compare with the naive ones."""
    start, quorum, last = np.ones((SIZE, 1)), size - 1, size - 1
    w = hpc.Variable(start, "w", sparse=sparse)
    server = naive.SyncReplicas({"w": start}, naive.Momentum(0.5), quorum, LATE)
    chosen = {"lateness": quarter, "comm": comm, **options}
    with started(hpc.SyncReplicasOptimizer(hpc.SGD(0.5), quorum, **chosen), [w]) as opt:

        def push(ranks, call):
            """Have ranks push with the parameters that they have; return receipts."""
            receipt = None
            if rank in ranks:
                grad = drawn(rank, call)[:, None]
                if sparse:
                    grad = hpc.IndexedSlices(grad, np.arange(SIZE), w.shape)
                receipt = opt.apply_gradients([(grad, w)], weight=rank + 1)
            receipts = meet(receipt)
            for each in ranks:
                found, given = receipts[each], {"w": drawn(each, call)[:, None]}
                accepted = server.push(given, found.local_step, each + 1)
                assert found.accepted == accepted
                assert found.factor == (LATE if accepted and found.lag == 1 else 1)
            center = meet(opt.center([w])[0])[rank]
            np.testing.assert_allclose(center, server.values["w"], 1e-12)
            return receipts

        push(range(quorum), 0)
        late = push(range(1, size), 1)[last]
        assert late == hpc.Receipt(True, 0, 1, factor=LATE)
        # Now rank 0 is late.
        assert push(range(quorum), 2)[0].factor == LATE
        push(range(quorum), 3)
        late = push([last], 4)[last]
        assert (late.accepted, late.lag) == (False, 2)
        tally = meet(opt.statistics())[0]
        assert (tally.lags[1], tally.lags[2], tally.dropped[last]) == (2, 1, 1)
        meet()


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_late_gradient_joins_the_next_update(comm, rank, size, sparse):
    play(comm, rank, size, sparse=sparse)


@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("several", [False, True])
def test_a_late_gradient_of_another_node(group, rank, size, several):
    play(group, rank, size, servers=[r[0] for r in group.nodes] if several else "auto")


@pytest.mark.any_size
@pytest.mark.parametrize("lateness", [None, lambda lag: 0.0])
def test_without_a_factor_a_late_gradient_is_dropped(comm, rank, size, lateness):
    w = variable()
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), 1, lateness=lateness, comm=comm) as opt:
        opt.initialize([w])
        pairs = opt.compute_gradients(gives(1.0))
        meet()
        receipts = turns(range(size), lambda _: opt.apply_gradients(pairs))
        assert [receipt.accepted for receipt in receipts] == [True] + [False] * (
            size - 1
        )


@pytest.mark.ranks(min=2)
def test_a_rank_with_a_share_gives_more_after_a_late_gradient(comm, rank, size):
    w, quorum = variable(), size + 1
    options = {"lateness": "inverse", "comm": comm}
    with started(hpc.SyncReplicasOptimizer(hpc.SGD(1), quorum, **options), [w]) as opt:

        def act(_):
            return opt.apply_gradients([(np.ones_like(w.value), w)])

        # Rank 0 gives the last gradient of the first update, while the last rank
        # computes its second one.
        receipts = turns([*range(size), 0, size - 1], act)
        assert receipts[-1] == hpc.Receipt(True, 0, 1, factor=0.5)
        assert opt.global_step == 1
        # It computes the next one with the parameters of now.
        assert meet(w.value.item())[-1] == -1
        assert all(meet(act(0)))
    assert opt.global_step == 2
    assert w.value == -2

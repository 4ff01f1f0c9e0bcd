"""Bad cases on several nodes: leaders that leave early, gradients that do not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError
from hpcaccum.nodes import Agent
from hpcaccum.server import BoundedStalenessInbox, QuorumInbox, node_copy

from .acting import at, everywhere, until
from .on_nodes import group_on_nodes  # noqa: F401
from .serving import next_total
from .support import WAIT, meet
from .training import ONE_SIDED, gives, raised, variable

# Calls of each rank after the first.
CALLS = 6


@pytest.fixture(params=ONE_SIDED)
def optimizer(request, group):
    """Make an optimizer that each rank can use, with its variable."""
    w = variable(np.zeros(3))
    made = ONE_SIDED[request.param](hpc.SGD(1.0), [w], group)
    made.initialize([w])
    yield made, w
    made.free()
    assert (np.array(meet(w.value)) == w.value).all()


@pytest.fixture(params=[(3,), None], ids=["fixed", "any shape"])
def accumulator(request, group):
    """Make an accumulator of vectors of three, or of vectors of any length."""
    options = {} if request.param else {"capacity": 8}
    made = hpc.ConditionalAccumulator("f8", request.param, comm=group, **options)
    yield made
    meet()
    made.free()


def train(optimizer, w, calls=CALLS):
    for _ in range(calls):
        optimizer.minimize(gives(np.ones(3)), var_list=[w])


@pytest.mark.parametrize("node", [0, -1])
def test_others_train_after_the_leader_of_a_node_has_left(optimizer, group, rank, node):
    opt, w = optimizer
    leader = group.nodes[node][0]
    train(opt, w, 2)
    meet()
    error = None
    if rank == leader:
        opt.leave()
        error = raised(train, opt, w, 2)
    else:
        train(opt, w)
    meet()
    pushes = [2 + CALLS * (each != leader) for each in range(group.size)]
    if isinstance(opt, hpc.AGNOptimizer):
        # Of every second gradient.
        pushes = [each // 2 for each in pushes]
    assert list(opt.statistics().accepted) == pushes
    if rank == leader:
        verb = "apply" if isinstance(opt, hpc.SyncReplicasOptimizer) else "submit"
        assert type(error) is InvalidArgumentError
        assert str(error) == f"rank {leader} has left and can {verb} no more gradients"


def test_takes_have_the_gradient_of_a_leader_that_has_left(accumulator, group, rank):
    acc, leader = accumulator, group.nodes[-1][0]
    others = [each for each in range(group.size) if each != leader]
    everywhere(acc.apply_grad, np.full(3, float(rank)), 0)
    at(leader, acc.leave)
    error = at(leader, raised, acc.apply_grad, np.zeros(3), 0)
    assert str(error) == f"rank {leader} has left and can apply no more gradients"
    taken = [at(-1, acc.take_grad, group.size, timeout=WAIT)]
    # As many as there are left.
    if rank != leader:
        acc.apply_grad(np.full(3, float(rank)), 1)
    meet()
    taken.append(at(0, acc.take_grad, group.size, timeout=WAIT))

    assert taken[0].tolist() == [np.mean(range(group.size))] * 3
    np.testing.assert_allclose(taken[1], np.mean(others))


def test_gradient_of_another_shape_changes_nothing(accumulator, group):
    acc, others = accumulator, group.size - 1
    for taker in (0, -1):
        step = acc.global_step
        for each in range(others):
            at(each, acc.apply_grad, np.ones(3), step)
        error = at(-1, raised, acc.apply_grad, np.ones(4), step)
        assert type(error) is InvalidArgumentError
        assert "(3,)" in str(error)
        assert "(4,)" in str(error)
        counts = meet((acc.num_accumulated(), acc.statistics().tally.accepted[-1]))
        assert counts == [(others, step)] * group.size
        # The rank may go on.
        at(-1, acc.apply_grad, np.full(3, 3.0), step)
        found = at(taker, acc.take_grad, group.size, timeout=WAIT)
        np.testing.assert_allclose(found, (others + 3) / group.size)


def test_gradient_of_another_shape_is_not_sent_to_the_server(optimizer, group, rank):
    opt, w = optimizer
    train(opt, w, 2)
    meet()
    before = opt.statistics(), opt.global_step
    meet()
    error = None
    if rank == group.size - 1:
        error = raised(opt.minimize, gives(np.ones(4)), var_list=[w])
    meet()
    after = opt.statistics(), opt.global_step
    meet()
    train(opt, w, 2)
    meet()

    assert after == before
    if error is not None:
        assert type(error) is InvalidArgumentError
        assert str(error) == "gradient of 'w' must have shape (3,), got (4,)"
    total = 4 // (1 + isinstance(opt, hpc.AGNOptimizer))
    assert opt.statistics().accepted == (total,) * group.size


@pytest.mark.parametrize("name", ["SyncReplicas", "DropStale"])
def test_variables_of_another_shape_are_an_error_on_all_nodes(group, rank, name):
    last = group.size - 1
    w, narrow = variable(np.zeros(3)), variable(np.zeros(4))
    opt = ONE_SIDED[name](hpc.SGD(1.0), [w], group)
    error = raised(opt.initialize, [narrow if rank == last else w])
    assert type(error) is DisagreementError
    assert f"rank {last} has [('w', (4,), 'float64')]" in str(error)
    assert "agent" not in group.named
    opt.initialize([w])
    train(opt, w, 2)
    opt.free()
    assert w.value[0] < 0


@pytest.mark.parametrize("kind", [QuorumInbox, BoundedStalenessInbox])
@pytest.mark.parametrize("last", [0, -1])
def test_a_host_that_waits_for_gradients_leaves_it_to_its_agent(
    group, kind, last, monkeypatch
):
    size, waits, wait = group.size, [], Agent.wait

    def noted(*args):
        waits.append(args)
        wait(*args)

    monkeypatch.setattr(Agent, "wait", noted)
    needs = (size, size) if kind is QuorumInbox else ()
    inbox = kind(group, 0, 3, np.float64, *needs)

    def submit():
        inbox.slot()[:] = 3
        assert inbox.submit(0)

    if kind is QuorumInbox and group.rank != last % size:
        submit()
    meet()
    with ThreadPoolExecutor(1) as pool:
        if group.rank == 0:
            total = pool.submit(next_total, inbox, 0, 3)
            until(lambda: waits)
        meet()
        # By the host itself, or by an agent.
        if group.rank == last % size:
            submit()
        if group.rank == 0:
            assert total.result(WAIT).tolist() == [3, 3, 3]
    assert len(waits) == (group.rank == 0)
    meet()
    inbox.free()


@pytest.mark.parametrize("all_give", [True, False])
def test_a_rank_asks_for_the_newest_step_if_others_may_have_made_it(
    group, all_give, monkeypatch
):
    # As if it had computed for a while.
    monkeypatch.setattr(node_copy, "_RECENT", 0.0)
    var, quorum = variable(), group.size if all_give else 1
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), quorum, comm=group) as opt:
        opt.initialize([var])
        asked, newest = [], opt._server._parameters.newest
        monkeypatch.setattr(
            opt._server._parameters, "newest", lambda: asked.append(1) or newest()
        )
        for _ in range(3):
            opt.minimize(gives(1.0))
        meet()
        if all_give:
            assert not asked
            assert var.value == -3
        else:
            assert len(asked) >= 3


def test_a_rank_that_calls_or_has_the_words_wakes_its_own_agent(
    group, rank, monkeypatch
):
    woken, var, wake = [], variable(), Agent.wake
    monkeypatch.setattr(Agent, "wake", lambda self: woken.append(1) or wake(self))
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), group.size, comm=group) as opt:
        opt.initialize([var])
        meet()
        woken.clear()
        opt._server.push({"w": np.ones(())}, 0)
        # Others of the host's node need no agent, except with Open MPI.
        assert woken or (group.node_number == 0 and rank != 0)
        meet()

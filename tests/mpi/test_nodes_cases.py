"""Bad cases on several nodes: leaders that leave early, gradients that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError, WaitTimeoutError, testing

from .acting import VAIN, at, everywhere
from .on_nodes import group_on_nodes, held_agent, named  # noqa: F401
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


def in_vain(monkeypatch, opt, step):
    """Wait for a step that does not come; return the message."""
    with monkeypatch.context() as patch:
        patch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
        error = raised(testing.wait_for, opt, step)
    assert type(error) is WaitTimeoutError
    return str(error)


def test_ranks_of_a_node_may_wait_for_different_steps(group, rank, monkeypatch):
    w = variable()
    with hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group) as opt:
        opt.initialize([w])
        # It never comes: that must not keep a step that is there from the node.
        assert "for update 9 by rank 0" in in_vain(monkeypatch, opt, 9)
        meet()
        for step in (1, 2):
            if rank == 0:
                opt.minimize(gives(1.0))
            testing.wait_for(opt, step)
            assert opt.center(w) == -step
            meet()


def test_a_node_that_parameters_do_not_reach_is_named(group, rank, held, monkeypatch):
    w, first, last = variable(), group.nodes[0][0], group.nodes[-1]
    with hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group) as opt:
        opt.initialize([w])
        with held:
            if rank == 0:
                opt.minimize(gives(1.0))
            meet()
            late = in_vain(monkeypatch, opt, 1) if rank in last else ""
            here = [] if rank in last else [testing.wait_for(opt, 1)]
        way = f"step 1, on its way from {named(first)} to {named(last[0])}"
        assert late.endswith(f" s for {way}") or here
        testing.wait_for(opt, 1)
        assert opt.center(w) == -1
        meet()

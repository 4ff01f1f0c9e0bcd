"""Servers that an exception interrupts, such as that of a signal handler."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import WaitTimeoutError
from hpcaccum.nodes import Agent
from hpcaccum.server.background import Background

from ..common import same_bits
from .acting import at
from .interrupting import at_each_point, interrupt
from .on_nodes import group_on_nodes as group_on_nodes
from .support import meet
from .training import gives, raised

COUNT = 300


class Whole(hpc.Momentum):
    """A rule that is not elementwise, so no other rank helps."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        super().apply_gradients(list(grads_and_vars), global_step, name)


def raise_once(owner, name, *, before):
    """Make a method raise KeyboardInterrupt once, before or after its work."""
    method = getattr(owner, name)

    def interrupted(*args, **kwargs):
        setattr(owner, name, method)
        if not before:
            method(*args, **kwargs)
        raise KeyboardInterrupt

    setattr(owner, name, interrupted)


def train(opt, var, serves):
    """Make four steps; return the variable's value after them."""
    if serves:
        opt.serve()
        # There is nothing left to do.
        opt.serve()
    else:
        for _ in range(4):
            opt.minimize(gives(np.ones(COUNT)))
        opt.leave()
    meet()
    opt.free()
    return var.value


EXPECTED = np.full(COUNT, -(1 + 1.5 + 1.75 + 1.875))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("rule", [hpc.Momentum, Whole])
@pytest.mark.parametrize("where", ["updated", "published", "taken"])
@pytest.mark.parametrize("kind", ["sync", "drop_stale"])
def test_an_update_is_made_once(comm, rank, size, kind, rule, where):
    var = hpc.Variable(np.zeros(COUNT), "w")
    if kind == "sync":
        opt = hpc.SyncReplicasOptimizer(
            rule(1.0, 0.5), size - 1, comm=comm, dedicated=True
        )
        expected, updates = EXPECTED, 4
    else:
        opt = hpc.DropStaleGradientOptimizer(
            rule(1.0, 0.0), 1000, comm=comm, dedicated=True
        )
        updates = 4 * (size - 1)
        expected = np.full(COUNT, -float(updates))
    opt.initialize([var])
    if rank == 0:
        loop = opt._server._role
        if where == "updated":
            raise_once(loop._parameters.copies, "complete", before=True)
        elif where == "published":
            raise_once(loop._parameters, "publish", before=False)
        else:
            raise_once(loop._inbox, "next", before=False)
        with pytest.raises(KeyboardInterrupt):
            opt.serve()
    same_bits(train(opt, var, rank == 0), expected)
    assert opt.global_step == updates


@pytest.mark.parametrize(
    "where", ["ordered", "made", "done", "asked", "answered", "ended"]
)
def test_several_servers_make_an_update_once(group, where):
    servers = [ranks[0] for ranks in group.nodes]
    if len(servers) == group.size:
        pytest.skip("no rank is left to train")
    var, workers = hpc.Variable(np.zeros(COUNT), "w"), group.size - len(servers)
    opt = hpc.SyncReplicasOptimizer(
        hpc.Momentum(1.0, 0.5), workers, comm=group, servers=servers, dedicated=True
    )
    opt.initialize([var])
    of_host = where in ("ordered", "asked", "ended")
    if group.rank == servers[0 if of_host else -1]:
        parameters = opt._server._parameters
        if where == "ordered":
            raise_once(parameters, "_request", before=False)
        elif of_host:
            raise_once(parameters, "end", before=where == "asked")
        elif where == "answered":
            raise_once(parameters.questions, "answer", before=False)
        else:
            raise_once(parameters, "done", before=where == "made")
        with pytest.raises(KeyboardInterrupt):
            opt.serve()
    found = train(opt, var, group.rank in servers)
    same_bits(found, EXPECTED)
    assert opt.global_step == 4
    meet()
    # A later optimizer would receive it.
    assert not Agent.of(group).comm.Iprobe()


def test_a_signal_handler_reads_slots_of_several_servers(group):
    """Also during another such read, whose answers it may receive."""
    var, servers = hpc.Variable(np.zeros(COUNT), "w"), [0, group.nodes[-1][0]]
    opt = hpc.SyncReplicasOptimizer(
        hpc.Momentum(1.0, 0.5), group.size, comm=group, servers=servers
    )
    opt.initialize([var])
    opt.minimize(gives(np.ones(COUNT)))

    def trial(number):
        found = []

        def read():
            found.append(opt.get_slot(var, "momentum").value)

        fired = interrupt(read, number, act=read)
        assert len(found) == 1 + fired
        for each in found:
            same_bits(each, np.ones(COUNT))
        return fired, len(found)

    at(0, at_each_point, trial)
    opt.free()


def test_an_update_that_was_interrupted_is_not_begun_again():
    loop, changes = Background(), []

    def interrupted():
        changes.append("begun")
        raise KeyboardInterrupt

    def make(number, change):
        return loop._make_once(number, lambda: change)

    for _ in range(2):
        assert make(1, lambda: changes.append(1))
    # Neither has begun.
    assert not make(2, None)
    assert type(raised(loop._make_once, 2, lambda: [][0])) is IndexError
    assert make(2, lambda: changes.append(2))
    with pytest.raises(KeyboardInterrupt):
        make(3, interrupted)
    error = raised(make, 3, lambda: changes.append(3))

    assert type(error) is RuntimeError
    assert "which are now partly updated" in str(error)
    assert changes == [1, 2, "begun"]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("elements", [2, 1 << 16])
@pytest.mark.parametrize("wide", [False, True])
def test_a_server_goes_on_after_an_error_of_the_learning_rate(
    comm, rank, elements, wide
):
    failures = [ValueError("no rate")]

    def rate():
        if failures and rank == 0:
            raise failures.pop()
        return 0.5

    variables = [hpc.Variable(np.zeros(elements, "f4"), "x")]
    if wide:
        # Without an update that all ranks of a node make together.
        variables.append(hpc.Variable(np.zeros(1, "f8"), "y"))
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(rate), 1, comm=comm, dedicated=True)
    opt.initialize(variables)
    if rank == 0:
        with pytest.raises(ValueError, match="no rate"):
            opt.serve()
        opt.serve()
    elif rank == 1:
        opt.apply_gradients([(np.ones_like(v.value), v) for v in variables])
    opt.free()
    assert opt.global_step == 1
    same_bits(opt.center(variables[0]), np.full(elements, -0.5, "f4"))


def test_slots_are_asked_for_again_after_an_interruption(group):
    # Answers are large: MPI does not send them before the host receives them.
    count, servers = 1 << 15, [ranks[0] for ranks in group.nodes]
    var, rule = hpc.Variable(np.zeros(count), "w"), hpc.Momentum(1.0, 0.5)
    opt = hpc.SyncReplicasOptimizer(rule, group.size, comm=group, servers=servers)
    opt.initialize([var])
    opt.minimize(gives(np.ones(count)))
    meet()

    def trial(point):
        more = interrupt(lambda: opt.get_slot(var, "momentum"), point)
        same_bits(opt.get_slot(var, "momentum").value, np.ones(count))
        return more, None

    at(0, at_each_point, trial, every=5)
    if group.rank == 0:
        # The last one is given up when servers answer it.
        raise_once(opt._server._parameters.questions, "_wait_for", before=True)
        with pytest.raises(KeyboardInterrupt):
            opt.get_slot(var, "momentum")
    meet()
    opt.minimize(gives(np.ones(count)))
    same_bits(var.value, np.full(count, -2.5))
    meet()
    opt.free()


@pytest.mark.parametrize("kind", ["drop_stale", "sync"])
def test_free_can_be_repeated_after_a_time_limit(group, kind):
    var = hpc.Variable(np.zeros(COUNT), "w")
    if kind == "sync":
        opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), group.size, comm=group)
    else:
        opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 1000, comm=group)
    opt.initialize([var])
    # It has words in the same window.
    other = hpc.ConditionalAccumulator(np.float32, (2,), comm=group)
    opt.minimize(gives(np.ones(COUNT)))
    meet()
    agent, calls = opt._server._parameters._agent, []
    remove = agent.remove

    def late(*args):
        calls.append(args)
        if len(calls) == 2:
            raise WaitTimeoutError("on all ranks")
        return remove(*args)

    agent.remove = late
    assert type(raised(opt.free)) is WaitTimeoutError
    opt.free()
    other.apply_grad(np.ones(2))
    meet()
    if group.rank == 0:
        assert (other.take_grad(group.size) == 1).all()
    meet()
    other.free()

"""Servers that an exception ends: in a wait they go on, in an update they do not."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.nodes import Agent
from tests import internals

from .acting import at, interrupted, meet, same_bits
from .on_nodes import leaders, workers
from .test_servers import dedicated
from .training import gives, raised

COUNT = 300
# After four steps with gradients of 1.
EXPECTED = np.full(COUNT, -(1 + 1.5 + 1.75 + 1.875))


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


@pytest.mark.ranks(min=2)
def test_a_server_goes_on_after_an_interrupted_wait(comm, rank, size):
    var = hpc.Variable(np.zeros(COUNT), "w")
    opt = hpc.SyncReplicasOptimizer(
        hpc.Momentum(1.0, 0.5), size - 1, comm=comm, dedicated=True
    )
    opt.initialize([var])
    at(0, interrupted, opt.serve)
    same_bits(train(opt, var, rank == 0), EXPECTED)
    assert opt.global_step == 4


@pytest.mark.parametrize("which", [0, -1])
def test_several_servers_go_on_after_an_interrupted_wait(group, which):
    var, opt, servers = dedicated(group, hpc.Momentum(1.0, 0.5))
    meet()
    if group.rank == servers[which]:
        interrupted(opt.serve)
    meet()
    if which and group.rank == servers[which]:
        # Between the receipt of an order and its update.
        with internals.interrupt_order(MemoryError):
            assert type(raised(opt.serve)) is MemoryError
    same_bits(train(opt, var, group.rank in servers), EXPECTED)
    assert opt.global_step == 4
    meet()
    # A later optimizer would receive it.
    assert not Agent.of(group).comm.Iprobe()


class Fails(hpc.SGD):
    """A rule that fails once, in the middle of an update."""

    failed = False

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        super().apply_gradients(list(grads_and_vars), global_step, name)
        if not self.failed:
            self.failed = True
            raise MemoryError


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("several", [False, True])
def test_a_server_whose_update_fails_is_broken(group, several):
    servers, var = leaders(group)[: 1 + several], hpc.Variable(np.zeros(COUNT), "w")
    training = workers(group, servers)
    opt = hpc.DropStaleGradientOptimizer(
        Fails(1.0), 9, comm=group, servers=servers, dedicated=True
    )
    opt.initialize([var])
    if group.rank == training[0]:
        internals.push(opt, {"w": np.ones(COUNT)}, 0)
    if group.rank == servers[-1]:
        assert type(raised(opt.serve)) is MemoryError
        again = raised(opt.serve)
        assert type(again) is hpc.BrokenObjectError
        assert "the parameters are now partly updated" in str(again)
        internals.mend(opt)
    elif group.rank in servers:
        opt.inner.failed = True
    opt.free()
    assert opt.global_step == 1


@pytest.mark.parametrize("step", ["question", "answers"])
def test_a_read_within_another_one_gets_its_own_answers(group, step):
    """As that of a signal handler that saves."""
    var, servers = hpc.Variable(np.zeros(COUNT), "w"), [0, group.nodes[-1][0]]
    opt = hpc.SyncReplicasOptimizer(
        hpc.Momentum(1.0, 0.5), group.size, comm=group, servers=servers
    )
    opt.initialize([var])
    opt.minimize(gives(np.ones(COUNT)))
    found, reads = [], 0

    def read(*_):
        nonlocal reads
        reads += 1
        if reads <= 2:
            found.append(opt.get_slot(var, "momentum").value)

    if group.rank == 0:
        with internals.before(step, opt, read):
            read()
        assert len(found) == 2
        for each in found:
            same_bits(each, np.ones(COUNT))
    meet()
    opt.free()


def test_slots_are_asked_for_again_after_an_interruption(group):
    # Answers are large: MPI does not send them before the host receives them.
    count, servers = 1 << 15, leaders(group)
    var, rule = hpc.Variable(np.zeros(count), "w"), hpc.Momentum(1.0, 0.5)
    opt = hpc.SyncReplicasOptimizer(rule, group.size, comm=group, servers=servers)
    opt.initialize([var])
    opt.minimize(gives(np.ones(count)))
    meet()

    if group.rank == 0:
        stop = internals.fail("answers", opt, KeyboardInterrupt)
        with stop, pytest.raises(KeyboardInterrupt):
            opt.get_slot(var, "momentum")
        same_bits(opt.get_slot(var, "momentum").value, np.ones(count))
        # The last one is given up when servers answer it.
        with stop, pytest.raises(KeyboardInterrupt):
            opt.get_slot(var, "momentum")
    meet()
    opt.minimize(gives(np.ones(count)))
    same_bits(var.value, np.full(count, -2.5))
    meet()
    opt.free()

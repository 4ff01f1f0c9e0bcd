"""Ranks on several nodes: their agents, and cases that are bad for them."""

import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import ConditionalAccumulator, WaitTimeoutError
from hpcaccum.mpi import MPI
from tests import internals

from .acting import VAIN, WAIT, Take, at, everywhere, meet
from .on_nodes import leads, named
from .training import ONE_SIDED, check_error, gives, raised, started, variable


def made(group, **options):
    return ConditionalAccumulator("f8", (3,), comm=group, **options)


def agents():
    return sum(each.name.startswith("agent") for each in threading.enumerate())


def test_there_is_one_agent_on_each_node_while_it_is_needed(group):
    before, found = agents(), []
    with made(group):
        with made(group):
            found.append(agents() - before)
        found.append(agents() - before)
    assert found == [leads(group)] * 2
    assert agents() == before


def test_ranks_of_one_node_have_no_agent(one_node):
    before = agents()
    with made(one_node):
        assert agents() == before


def test_accumulators_are_made_used_at_once_and_freed_many_times(group, rank, size):
    # Requests may come before an agent has added an object, or removed the last one.
    numbers = []
    for turn in range(20):
        with made(group, host=turn % size) as acc:
            assert acc.apply_grad(np.full(3, float(turn)))
            if rank == (turn + 1) % size:
                assert (acc.take_grad(size, timeout=WAIT) == turn).all()
            numbers.append(communicators(group))
    # MPICH has 2,048 communicators; each new agent takes one. Now and then, another one
    # is free, of earlier tests.
    assert np.median(np.subtract(numbers[size:], numbers[:-size])) <= 0


def communicators(group):
    """Return the number of a new communicator, which grows with those in use."""
    comm = group.comm.Dup()
    number = comm.py2f()
    comm.Free()
    return number


def test_a_take_that_waits_does_not_delay_others(group, size):
    with made(group) as slow, made(group) as quick:
        take = Take(slow, -1, size + 1)
        for step in range(3):
            everywhere(slow.apply_grad, np.ones(3), 9) if step == 1 else None
            everywhere(quick.apply_grad, np.ones(3), step)
            assert (at(step, quick.take_grad, size, timeout=WAIT) == 1).all()
        assert not take.over()
        at(0, slow.apply_grad, np.ones(3), 9)
        assert (take.result() == 1).all()


@pytest.mark.parametrize("storage", ["slots", "sum"])
def test_takes_of_all_ranks_are_served_in_their_order(group, size, storage):
    with made(group, host=group.nodes[-1][-1], storage=storage) as acc:
        takes = [Take(acc, rank, 1) for rank in range(size)]
        for value in range(size):
            assert at(0, acc.apply_grad, np.full(3, float(value)), 99)
            assert (takes[value].result() == value).all()


def test_an_agent_that_does_not_end_its_work_is_named(held, group, rank, monkeypatch):
    acc = made(group)
    # So that it is asked for its sum.
    with internals.limits(short=0):
        everywhere(acc.apply_grad, np.ones(3))
    with held, internals.limits(sums=VAIN):
        with pytest.raises(WaitTimeoutError):
            at(0, acc.take_grad, 1, timeout=VAIN)
        if rank == 0:
            # Enough for the other ranks to come.
            monkeypatch.setenv("HPCACCUM_TIMEOUT", str(10 * VAIN))
        error = raised(acc.free)
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    # All ranks can try again.
    acc.free()
    assert type(error) is (RuntimeError if rank else WaitTimeoutError)
    # It still waits for the sum of the last node.
    assert str(error).endswith(f" s for the agent of {named(0)} to end its work")


def test_without_threads_every_rank_gets_an_error(group, rank, monkeypatch):
    # One of the processes is enough.
    odd, before = group.nodes[-1][0], agents()
    if rank == odd:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    for _ in range(2):
        error = raised(made, group)
        check_error(error, "MPI provides no MPI_THREAD_MULTIPLE")
        assert rank == odd or f"rank {odd}: " in str(error)
    assert agents() == before
    meet()


def test_ranks_that_are_not_leaders_need_no_threads(group, rank, monkeypatch):
    if not leads(group):
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with made(group) as acc:
        everywhere(acc.apply_grad, np.ones(3))


@pytest.mark.parametrize("kind", ONE_SIDED)
@pytest.mark.parametrize("node", [0, -1])
def test_others_train_after_the_leader_of_a_node_has_left(group, rank, kind, node):
    w, leader = variable(np.zeros(3)), group.nodes[node][0]
    with started(ONE_SIDED[kind](hpc.SGD(1.0), [w], group), [w]) as opt:
        for call in range(8):
            if rank != leader or call < 2:
                opt.minimize(gives(np.ones(3)))
            if call == 1:
                meet()
                opt.leave() if rank == leader else None
        meet()
        # AGN pushes every second gradient.
        number = 1 + (kind != "AGN")
        pushes = tuple(number * (1 + 3 * (r != leader)) for r in range(group.size))
        assert opt.statistics().accepted == pushes
    assert (np.array(meet(w.value)) == w.value).all()


def test_takes_have_the_gradient_of_a_leader_that_has_left(group, rank):
    leader = group.nodes[-1][0]
    others = [each for each in range(group.size) if each != leader]
    with made(group) as acc:
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


def test_ranks_of_a_node_may_wait_for_different_steps(group, rank, in_vain):
    w = variable()
    with started(hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group), [w]) as opt:
        # It never comes: that must not keep a step that is there from the node.
        assert "for update 9 by rank 0" in in_vain(internals.wait_for, opt, 9)
        meet()
        for step in (1, 2):
            if rank == 0:
                opt.minimize(gives(1.0))
            internals.wait_for(opt, step)
            assert opt.center(w) == -step
            meet()


def test_a_node_that_parameters_do_not_reach_is_named(group, rank, held, in_vain):
    w, first, last = variable(), group.nodes[0][0], group.nodes[-1]
    with started(hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group), [w]) as opt:
        with held:
            if rank == 0:
                opt.minimize(gives(1.0))
            meet()
            # Enough for the answer of the host, of which the message is made.
            late = (
                in_vain(internals.wait_for, opt, 1, seconds=0.5) if rank in last else ""
            )
            here = [] if rank in last else [internals.wait_for(opt, 1)]
        way = f"step 1, on its way from {named(first)} to {named(last[0])}"
        assert late.endswith(f" s for {way}") or here
        internals.wait_for(opt, 1)
        assert opt.center(w) == -1
        meet()

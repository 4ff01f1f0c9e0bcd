"""Agents of nodes: when there is one, and what is reported if it cannot be used."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hpcaccum import (
    ConditionalAccumulator,
    InvalidArgumentError,
    WaitTimeoutError,
    group_of,
    testing,
)
from hpcaccum.mpi import MPI

from .acting import VAIN, Take, at, everywhere
from .on_nodes import group_on_nodes, held_agent, leads, named  # noqa: F401
from .support import WAIT, meet
from .training import raised


def made(group, **options):
    return ConditionalAccumulator("f8", (3,), comm=group, **options)


def agents():
    """Return the number of agents of this rank."""
    return sum(each.name.startswith("agent") for each in threading.enumerate())


def test_there_is_one_agent_on_each_node_while_it_is_needed(group):
    before, found = agents(), []
    with made(group):
        with made(group):
            found.append(agents() - before)
        found.append(agents() - before)
    assert found == [leads(group)] * 2
    assert agents() == before


def test_ranks_of_one_node_have_no_agent(comm):
    if not group_of(comm).single_node:
        pytest.skip("the ranks are on several nodes")
    before = agents()
    with made(comm):
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


def test_an_agent_that_does_not_end_its_work_is_named(held, group, rank, monkeypatch):
    acc = made(group)
    # So that it is asked for its sum.
    with testing.limits(short=0):
        everywhere(acc.apply_grad, np.ones(3))
    with held, testing.limits(sums=VAIN):
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
        assert type(error) is InvalidArgumentError
        assert "MPI provides no MPI_THREAD_MULTIPLE" in str(error)
        assert rank == odd or f"rank {odd}: " in str(error)
    assert agents() == before
    meet()


def test_ranks_that_are_not_leaders_need_no_threads(group, rank, monkeypatch):
    if not leads(group):
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with made(group) as acc:
        everywhere(acc.apply_grad, np.ones(3))

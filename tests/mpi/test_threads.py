"""Threads of a rank that make, use and free objects, each on a communicator of its own.

Ranks start their threads in different orders. So none may hold a lock of its process
while it waits for the same thread of another rank.
"""

import threading
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.mpi.job import shutdown
from hpcaccum.mpi.memory import windows
from hpcaccum.mpi.talk.creation import alone

from .acting import meet
from .reducing import made_up
from .training import WRAPPERS, started

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.own_comm, pytest.mark.any_size]

THREADS = 4


def run_threads(rank, act):
    """Call ``act(number)`` on each thread; raise the first error."""
    errors, go = [], threading.Barrier(THREADS)

    def run(number):
        try:
            go.wait()
            act(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads if rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def accumulator(comm):
    acc = hpc.ConditionalAccumulator("f4", (300,), comm=comm)
    acc.apply_grad(np.ones(300, "f4"), 0)
    return acc


def sparse(comm):
    acc = hpc.SparseConditionalAccumulator("f4", (9, 2), capacity=3, comm=comm)
    acc.apply_grad([1, 5], np.ones((2, 2), "f4"))
    return acc


def reducer(schedule, comm):
    made = hpc.Reducer(hpc.Layout({"x": (300,)}, "f4"), comm, schedule=schedule)
    assert (made.reduce({"x": np.full(300, 2, "f4")})["x"] == 2).all()
    return made


def optimizer(kind, comm):
    w = hpc.Variable(np.zeros(300), "w")
    opt = started(WRAPPERS[kind](hpc.SGD(0.1), [w], comm), [w])
    for _ in range(2):
        opt.minimize(lambda: (1.0, [w.value - 1]))
    return opt


KINDS = [
    accumulator,
    partial(reducer, "flat"),
    partial(optimizer, "CrossShard"),
    partial(optimizer, "AGN"),
    sparse,
    partial(optimizer, "SyncReplicas"),
    partial(reducer, "hierarchical"),
    partial(optimizer, "DropStale"),
]


@pytest.fixture
def own_end(monkeypatch):
    """Lists of what is to be closed at the end, for this test."""
    # Later tests need it.
    windows.memory_barrier()
    monkeypatch.setattr(shutdown, "_open", [])
    monkeypatch.setattr(shutdown, "_ending", False)


@pytest.mark.parametrize(
    ("nodes", "end"),
    [("real", "free"), ("singles", "free"), ("halves", "exit")],
)
def test_each_thread_has_objects_of_its_own(comm, rank, size, own_end, nodes, end):
    comms = [comm.Dup() for _ in range(THREADS)]
    users = comms if nodes == "real" else [made_up(each, nodes) for each in comms]
    made = []

    def act(number):
        for kind in (KINDS[number], KINDS[number + THREADS]):
            each = kind(users[number])
            # One that is dropped warns.
            made.append(each)
            if end == "free":
                each.free()
        if nodes == "real":
            # The first such sum would stop all threads.
            assert comms[number].allreduce(1) == size
        if end == "free":
            comms[number].Free()

    run_threads(rank, act)
    meet()
    shutdown._close_all()
    assert not shutdown.count_open()


def test_what_must_be_alone_waits_for_no_thread_that_has_not_come(comm, rank):
    comms, inside, come = [comm.Dup() for _ in range(2)], [], threading.Event()

    def act(number):
        if number >= 2:
            return
        if number == 0 and rank == 0:
            # It comes when the other one has been inside on all ranks.
            come.wait()
        for _ in range(5):
            with alone(comms[number], "test", "all ranks"):
                inside.append(number)
                assert len(inside) == 1
                comms[number].Barrier()
                inside.remove(number)
        come.set()

    run_threads(rank, act)
    for each in comms:
        each.Free()


def test_the_world_is_left_to_other_threads(comm, rank, size):
    done = threading.Event()

    def act():
        accumulator(comm).free()
        done.set()

    other = threading.Thread(target=act)
    other.start()
    if rank == size - 1:
        done.wait()
    # On the other ranks, meanwhile.
    assert MPI.COMM_WORLD.allreduce(rank, MPI.MAX) == size - 1
    other.join()

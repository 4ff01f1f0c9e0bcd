"""Updates that the ranks of a node carry out together."""

import os
import threading
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.mpi import MPI
from tests import internals

from .. import naive
from .acting import meet, same_bits, until
from .training import RULES, SHAPES, drawn, several, started

KINDS = {**RULES, "Nesterov": lambda: hpc.Momentum(0.1, 0.9, use_nesterov=True)}


@pytest.fixture(autouse=True)
def short_pieces():
    """Divide short vectors, too."""
    with internals.limits(chunk=48, least=96, most=96, thread=96):
        yield


def train(opt, variables, calls, lacks=lambda rank, call: ()):
    """Make steps with drawn gradients, without those of some variables."""
    rank = MPI.COMM_WORLD.rank
    for call in range(calls):
        grads = drawn(rank, call, variables)
        for missing in lacks(rank, call):
            grads[missing] = None
        opt.minimize(lambda grads=grads: (0.0, grads), var_list=variables)


def modelled(rule, dtype, size, calls, lacks=lambda rank, call: ()):
    """Return the variables after the same steps of one process, and their rule."""
    variables = several(dtype)
    for call in range(calls):
        grads = [drawn(rank, call, variables) for rank in range(size)]
        pairs = []
        for number, var in enumerate(variables):
            parts = [
                grads[rank][number]
                for rank in range(size)
                if number not in lacks(rank, call)
            ]
            pairs.append((naive.allreduce(parts) if parts else None, var))
        rule.apply_gradients(pairs)
    return variables, rule


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, np.float32) for kind in KINDS] + [("Momentum", np.float64)],
)
def test_all_bits_are_those_of_the_rule(comm, size, kind, dtype):
    variables = several(dtype)
    with hpc.SyncReplicasOptimizer(KINDS[kind](), size, comm=comm) as opt:
        train(opt, variables, 4)
        meet()
        expected, rule = modelled(KINDS[kind](), dtype, size, 4)
        for own, var in zip(variables, expected, strict=True):
            same_bits(own.value, var.value)
            for slot in rule.get_slot_names() if comm.rank == 0 else ():
                same_bits(opt.get_slot(own, slot).value, rule.get_slot(var, slot).value)
        meet()
    # After the end, the slots are still there.
    if comm.rank == 0:
        for slot in rule.get_slot_names():
            same = opt.get_slot(variables[0], slot).value
            same_bits(same, rule.get_slot(expected[0], slot).value)


def some(rank, call):
    """Of the second call no rank has the vector's; of the third, rank 0 lacks one."""
    return {1: [2], 2: [0] if rank == 0 else []}.get(call, [])


@pytest.mark.ranks(max=2)
@pytest.mark.parametrize("kind", KINDS)
def test_missing_gradients_change_nothing(comm, size, kind):
    # With Adam, the variables have had different numbers of updates from then on.
    variables = several()
    with hpc.SyncReplicasOptimizer(KINDS[kind](), size, comm=comm) as opt:
        train(opt, variables, 5, some)
        meet()
    expected, _ = modelled(KINDS[kind](), np.float32, size, 5, some)
    for own, var in zip(variables, expected, strict=True):
        # A mean of fewer is divided twice.
        np.testing.assert_allclose(own.value, var.value, 1e-5)


def noted_pieces(opt, before=lambda piece: None):
    """Return a list of the pieces that this rank works on, from now on. Collective."""
    pieces = []

    def note(piece, *_):
        before(piece)
        pieces.append(piece)

    internals.before("piece", opt, note).start()
    meet()
    return pieces


def start(comm, rule, size, **options):
    variables = several()
    opt = hpc.SyncReplicasOptimizer(rule, size, comm=comm, **options)
    opt.initialize(variables)
    return opt, variables


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_ranks_that_wait_work_on_the_update(comm, rank, size):
    opt, variables = start(comm, hpc.SGD(0.1), size)
    helped = threading.Event()

    def before(piece):
        # The host goes on when another rank has completed a piece.
        if rank == 0 and not helped.is_set():
            until(lambda: internals.pieces_done(opt))
            helped.set()
        # The update must not end without the pieces of a slow rank.
        time.sleep(0.02 * (rank > 0))

    pieces = noted_pieces(opt, before)
    train(opt, variables, 1)
    pulled = [var.value.copy() for var in variables]
    every = sorted(piece for found in meet(list(pieces)) for piece in found)
    opt.free()

    assert every == list(range(len(every))), "each piece once"
    assert len(every) > 5
    expected, _ = modelled(hpc.SGD(0.1), np.float32, size, 1)
    for own, var in zip(pulled, expected, strict=True):
        same_bits(own, var.value)


@pytest.mark.usefixtures("one_node")
def test_the_host_needs_no_help(comm, rank, size):
    variables = several()
    opt = started(hpc.DropStaleGradientOptimizer(hpc.SGD(0.1), 0, comm=comm), variables)
    pieces = noted_pieces(opt)
    if rank == size - 1:
        # The others wait in a barrier.
        train(opt, variables, 3)
    meet()
    found = meet(list(pieces))
    opt.free()

    if size > 2:
        assert all(not found[rank] for rank in range(1, size - 1))
    assert len([piece for each in found for piece in each]) % 3 == 0


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_without_threads_of_mpi_a_rank_does_not_help(comm, rank, size, monkeypatch):
    if rank != 0:
        monkeypatch.setattr(MPI, "Query_thread", lambda: 0)
    opt, variables = start(comm, hpc.SGD(0.1), size - 1, dedicated=True)
    pieces = noted_pieces(opt)
    if rank == 0:
        opt.serve()
    else:
        train(opt, variables, 3)
        opt.leave()
    meet()
    found = meet(list(pieces))
    opt.free()

    assert not any(found[1:])
    assert len(found[0]) % 3 == 0


@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(("worth", "used"), [(0, 1), (2, 2), (5, 3)])
def test_cores_of_a_rank_work_if_there_is_enough_for_each(
    comm, rank, size, monkeypatch, worth, used
):
    """``worth``: for how many threads of each rank the elements are enough."""
    cores = set(range(3 * rank, 3 * rank + 3))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    elements, part = hpc.Layout(SHAPES, np.float32).size, comm.Dup()
    with internals.limits(thread=int(elements // (size * (worth or 0.5)))):
        opt, variables = start(part, hpc.SGD(0.1), size)
    threads = internals.update_threads(opt)
    train(opt, variables, 3)
    meet()
    opt.free()
    part.Free()

    assert threads == used
    expected, _ = modelled(hpc.SGD(0.1), np.float32, size, 3)
    for own, var in zip(variables, expected, strict=True):
        same_bits(own.value, var.value)

"""Updates that the ranks of a node carry out together."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import MPI
from hpcaccum.server import node_update

from ..common import same_bits
from .support import WAIT, add_often, meet
from .training import gives, raised

SHAPES = {"matrix": (37, 5), "scalar": (), "vector": (600,), "empty": (0,)}
RULES = {
    "SGD": lambda: hpc.SGD(0.1),
    "Momentum": lambda: hpc.Momentum(0.1, 0.9),
    "Nesterov": lambda: hpc.Momentum(0.1, 0.9, use_nesterov=True),
    "Adagrad": lambda: hpc.Adagrad(0.1),
    "Adam": lambda: hpc.Adam(lambda step: 0.1 / (step + 1)),
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Divide short vectors, too."""
    short = {"_CHUNK": 48, "_LEAST": 96, "_MOST": 96, "_THREAD": 96}
    for name, elements in short.items():
        monkeypatch.setattr(node_update, name, elements)


@pytest.fixture
def one_node(comm):
    if not Group.of(comm).single_node:
        pytest.skip("the ranks are on several nodes")


def made(dtype=np.float32):
    return [hpc.Variable(np.ones(s, dtype), name) for name, s in SHAPES.items()]


def drawn(rank, call, dtype):
    random = np.random.default_rng([rank, call])
    return [random.normal(size=shape).astype(dtype) for shape in SHAPES.values()]


def train(opt, variables, calls, lacks=lambda rank, call: ()):
    """Make steps with drawn gradients, without those of some variables."""
    rank = MPI.COMM_WORLD.rank
    for call in range(calls):
        grads = drawn(rank, call, variables[0].dtype)
        for missing in lacks(rank, call):
            grads[missing] = None
        opt.minimize(lambda grads=grads: (0.0, grads), var_list=variables)


def mean(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total / total.dtype.type(len(parts))


def modelled(rule, dtype, size, calls, lacks=lambda rank, call: ()):
    """Return the variables after the same steps of one process, and their rule."""
    variables = made(dtype)
    for call in range(calls):
        grads = [drawn(rank, call, dtype) for rank in range(size)]
        pairs = []
        for number, var in enumerate(variables):
            parts = [
                grads[rank][number]
                for rank in range(size)
                if number not in lacks(rank, call)
            ]
            pairs.append((mean(parts) if parts else None, var))
        rule.apply_gradients(pairs)
    return variables, rule


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize("kind", RULES)
def test_all_bits_are_those_of_the_rule(comm, size, kind, dtype):
    variables = made(dtype)
    with hpc.SyncReplicasOptimizer(RULES[kind](), size, comm=comm) as opt:
        train(opt, variables, 4)
        meet()
        expected, rule = modelled(RULES[kind](), dtype, size, 4)
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
@pytest.mark.parametrize("kind", RULES)
def test_missing_gradients_change_nothing(comm, size, kind):
    # With Adam, the variables have had different numbers of updates from then on.
    variables = made()
    with hpc.SyncReplicasOptimizer(RULES[kind](), size, comm=comm) as opt:
        train(opt, variables, 5, some)
        meet()
    expected, _ = modelled(RULES[kind](), np.float32, size, 5, some)
    for own, var in zip(variables, expected, strict=True):
        # A mean of fewer is divided twice.
        np.testing.assert_allclose(own.value, var.value, 1e-5)


class Counted(hpc.SGD):
    """Counts its updates."""

    __slots__ = ("calls",)

    def __init__(self):
        super().__init__(1.0)
        self.calls = 0

    def apply_gradients(self, *args, **kwargs):
        self.calls += 1
        return super().apply_gradients(*args, **kwargs)


def test_an_optimizer_of_the_user_makes_the_updates_itself(comm, rank, size):
    variables, rule = made(), Counted()
    assert not rule.elementwise
    with hpc.SyncReplicasOptimizer(rule, size, comm=comm) as opt:
        train(opt, variables, 3)
        meet()
    assert rule.calls == (3 if rank == 0 else 0)


class Own(hpc.Optimizer):
    """Says that it is elementwise, but is no rule of the package."""

    elementwise = True

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            var.value[...] -= grad


def test_an_optimizer_that_is_no_rule_makes_the_updates_itself(comm, size):
    variables = made()
    with hpc.SyncReplicasOptimizer(Own("own"), size, comm=comm) as opt:
        train(opt, variables, 2)
        meet()
    expected, _ = modelled(hpc.SGD(1.0), np.float32, size, 2)
    for own, var in zip(variables, expected, strict=True):
        same_bits(own.value, var.value)


def test_rules_of_the_package_are_elementwise():
    assert all(make().elementwise for make in RULES.values())


def test_a_learning_rate_is_called_once_for_an_update(comm, rank, size):
    calls = []

    def rate():
        calls.append(1)
        return 0.5

    variables = made()
    with hpc.SyncReplicasOptimizer(hpc.Momentum(rate, 0.9), size, comm=comm) as opt:
        train(opt, variables, 3)
        meet()
    assert len(calls) == (3 if rank == 0 else 0)


def watched(opt, before=lambda rank, piece: None):
    """Return a list of the pieces that this rank works on, from now on. Collective."""
    update, pieces = opt._server._node_update, []
    work_on = update._work_on

    def work(piece, given):
        before(MPI.COMM_WORLD.rank, piece)
        pieces.append(piece)
        work_on(piece, given)

    update._work_on = work
    meet()
    return pieces


def start(comm, rule, size, **options):
    variables = made()
    opt = hpc.SyncReplicasOptimizer(rule, size, comm=comm, **options)
    opt.initialize(variables)
    return opt, variables


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_ranks_that_wait_work_on_the_update(comm, rank, size):
    opt, variables = start(comm, hpc.SGD(0.1), size)
    helped = threading.Event()
    words = opt._server._node_update._words

    def before(rank, piece):
        # The host goes on when another rank has completed a piece.
        if rank == 0 and not helped.wait(0):
            deadline = Deadline(WAIT, "help")
            deadline.wait(lambda: words.read(node_update._DONE) or None, str)
            helped.set()
        # The update must not end without the pieces of a slow rank.
        time.sleep(0.02 * (rank > 0))

    pieces = watched(opt, before)
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
    variables = made()
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(0.1), 0, comm=comm)
    opt.initialize(variables)
    pieces = watched(opt)
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
def test_ranks_that_look_for_pieces_hide_no_update(comm, rank):
    """A rank still looks for a piece of an update when the next one is announced."""
    calls, variables = 300, made()
    with hpc.DropStaleGradientOptimizer(hpc.SGD(0.1), 0, comm=comm) as opt:
        opt.initialize(variables)
        words = opt._server._node_update._words
        meet()
        if rank == 0:
            train(opt, variables, calls)
        else:
            # It takes no piece, but MPI loads the word and stores it again.
            server = opt._server
            add_often(words, node_update._NEXT, 0, until=lambda: server.step == calls)
        meet()


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_numbers_of_updates_begin_again(comm, rank, size):
    opt, variables = start(comm, hpc.SGD(0.1), size)
    update = opt._server._node_update
    if rank == 0:
        last = (node_update._NUMBERED - 1) << node_update._BITS
        update._words.write(node_update._NEXT, last | update._pieces)
    meet()
    train(opt, variables, 2)
    meet()
    opt.free()
    expected, _ = modelled(hpc.SGD(0.1), np.float32, size, 2)
    for own, var in zip(variables, expected, strict=True):
        same_bits(own.value, var.value)


class Stopped(Exception):
    """What a signal handler raises."""


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_an_interrupted_wait_ends_no_piece(comm, rank, size):
    opt, variables = start(comm, hpc.Momentum(0.1, 0.9), size)
    handled = threading.Event()

    def handler(*_):
        if not handled.is_set():
            handled.set()
            raise Stopped

    def before(rank, piece):
        if rank == 0:
            # Others must get a piece.
            deadline = Deadline(WAIT, "help")
            words = opt._server._node_update._words
            deadline.wait(lambda: words.read(node_update._DONE) or None, str)
        # One that comes just before the main thread blocks does not wake it.
        while rank and not handled.wait(0.05):
            os.kill(os.getpid(), signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        watched(opt, before)
        grads = drawn(rank, 0, np.float32)
        failure = raised(opt.minimize, gives(*grads), var_list=variables)
        failures = meet(type(failure).__name__)
        # The update is complete.
        opt._pull_all()
    finally:
        signal.signal(signal.SIGUSR1, old)
    opt.free()

    assert "Stopped" in failures
    expected, _ = modelled(hpc.Momentum(0.1, 0.9), np.float32, size, 1)
    for own, var in zip(variables, expected, strict=True):
        same_bits(own.value, var.value)


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")
def test_without_threads_of_mpi_a_rank_does_not_help(comm, rank, size, monkeypatch):
    if rank != 0:
        monkeypatch.setattr(node_update.MPI, "Query_thread", lambda: 0)
    opt, variables = start(comm, hpc.SGD(0.1), size - 1, dedicated=True)
    pieces = watched(opt)
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
    elements = hpc.Layout(SHAPES, np.float32).size
    monkeypatch.setattr(
        node_update, "_THREAD", int(elements // (size * (worth or 0.5)))
    )
    part = comm.Dup()
    opt, variables = start(part, hpc.SGD(0.1), size)
    threads = opt._server._node_update._threads
    train(opt, variables, 3)
    meet()
    opt.free()
    part.Free()

    assert threads == used
    expected, _ = modelled(hpc.SGD(0.1), np.float32, size, 3)
    for own, var in zip(variables, expected, strict=True):
        same_bits(own.value, var.value)

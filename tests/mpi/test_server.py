"""ParameterServer: in a thread or alone, with ranks that come and go as they like."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hpcaccum import Group, InvalidArgumentError, WaitTimeoutError
from hpcaccum.inbox import MeanInbox
from hpcaccum.mpi import MPI
from hpcaccum.server import ParameterServer
from hpcaccum.updates import UpdateQueue

from .support import WAIT
from .training import meet, raised, turns


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))


@pytest.fixture(params=["threaded", "dedicated"])
def dedicated(request, size):
    if request.param == "dedicated" and size == 1:
        pytest.skip("a dedicated host needs 2 ranks")
    return request.param == "dedicated"


def start(comm, *, host=0, dedicated=False, quorum=None, shapes=None, updates=True):
    """Return a server whose updates subtract; quorum None: each by itself."""
    group = Group.of(comm)
    workers = group.size - dedicated

    def inbox(size, dtype):
        if quorum is None:
            return UpdateQueue(group, host, size, dtype, workers=workers)
        return MeanInbox(group, host, size, dtype, quorum, workers)

    initial = {
        name: np.full(shape, float(group.rank))
        for name, shape in (shapes or {"w": (3,)}).items()
    }
    server = ParameterServer(
        group, host, initial, inbox, dedicated=dedicated, what="server"
    )

    def update(grads):
        for name, grad in grads.items():
            server.centre[name] -= grad

    if server.is_host and updates:
        server.start(update)
    return server


def train(server, values):
    """Push one gradient after the other, waiting for each; return the receipts."""
    receipts, out = [], np.zeros(3)
    for value in values:
        receipts.append(server.push({"w": np.full(3, float(value))}, server.step))
        server.pull({"w": out}, at_least=receipts[-1].global_step + 1)
    return receipts


@pytest.mark.parametrize("where", ["first", "last"])
def test_every_gradient_of_every_worker_is_an_update(
    comm, rank, size, where, dedicated
):
    host = 0 if where == "first" else size - 1
    server = start(comm, host=host, dedicated=dedicated)
    if server.only_serves:
        server.serve()
    else:
        train(server, range(10))
        server.leave()
    meet()
    found, step, tally = server.read("w"), server.step, server.tally()
    server.free()

    workers = size - dedicated
    assert (found == host - 45 * workers).all()
    assert step == 10 * workers
    assert tally.accepted == tuple(
        0 if dedicated and r == host else 10 for r in range(size)
    )


def test_a_quorum_is_one_update_of_the_mean(comm, rank, size, dedicated):
    workers = size - dedicated
    server = start(comm, dedicated=dedicated, quorum=workers)
    if server.only_serves:
        server.serve()
    else:
        assert all(receipt.lag == 0 for receipt in train(server, [rank] * 5))
        server.leave()
    meet()
    found, step = server.read("w"), server.step
    server.free()

    mean = sum(range(size)) / workers
    np.testing.assert_allclose(found, -5 * mean, rtol=1e-12)
    assert step == 5


def test_step_0_is_what_the_host_has(comm, size):
    server = start(comm, host=size - 1)
    out = np.full(3, 7.0)
    step = server.pull({"w": out})
    server.free()

    assert step == 0
    assert (out == size - 1).all()


def test_nothing_is_copied_when_there_is_nothing_new(comm, rank):
    server = start(comm)
    out = np.full(3, 7.0)
    same = server.pull({"w": out}, known=0)
    assert (out == 7).all()
    meet()
    turns([0], lambda _: bool(train(server, [1])))
    new = server.pull({"w": out}, known=0)
    server.free()

    assert (same, new) == (0, 1)
    assert (out == -1).all()


def test_only_what_is_asked_for_is_copied(comm):
    server = start(comm, shapes={"w": (3,), "v": (2, 2), "none": (0,), "one": ()})
    out = np.full((2, 2), 7.0)
    server.pull({"v": out})
    shapes = [server.read(name).shape for name in ("w", "v", "none", "one")]
    server.free()

    assert (out == 0).all()
    assert shapes == [(3,), (2, 2), (0,), ()]


def test_a_pull_waits_for_the_step_it_wants(comm, rank, size):
    server = start(comm)
    meet()
    if rank == 0:
        time.sleep(0.3)
        train(server, [1])
    out = np.zeros(3)
    step, waited = server.pull({"w": out}, at_least=1), server.waited
    server.free()

    assert step == 1
    assert (out == -1).all()
    assert rank == 0 or waited > 0.05


def test_a_pull_that_waits_too_long_says_for_what(comm, size, monkeypatch):
    # Not serving: the limit would end that too.
    server = start(comm, host=size - 1, updates=False)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.1")
    error = raised(server.pull, {}, at_least=3)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    server.free()

    assert type(error) is WaitTimeoutError
    assert f"for update 3 by rank {size - 1}, is at 0" in str(error)


def test_a_variable_without_gradients_is_left_alone(comm, rank):
    server = start(comm, shapes={"w": (3,), "v": (2,)})

    def act(_):
        receipt = server.push({"w": np.ones(3)}, 0)
        return server.pull({}, at_least=receipt.global_step + 1)

    turns([0], act)
    found = server.read("w"), server.read("v")
    server.free()

    assert (found[0] == -1).all()
    assert (found[1] == 0).all()


@pytest.mark.ranks(min=2)
def test_a_mean_is_over_the_ranks_that_have_a_gradient(comm, rank, size):
    server = start(comm, quorum=size, shapes={"w": (3,), "v": ()})
    grads = {"w": np.full(3, float(rank))}
    if rank > 0:
        grads["v"] = np.array(8.0)
    receipt = server.push(grads, 0)
    server.pull({}, at_least=1)
    found = server.read("w"), server.read("v")
    server.free()

    assert receipt
    np.testing.assert_allclose(found[0], -(size - 1) / 2, rtol=1e-15)
    np.testing.assert_allclose(found[1], -8, rtol=1e-15)


@pytest.mark.parametrize("leaver", ["first", "last"])
@pytest.mark.ranks(min=2)
def test_a_rank_may_leave_while_others_go_on(comm, rank, size, leaver):
    # Also the host: it then only serves.
    leaver = 0 if leaver == "first" else size - 1
    server = start(comm, quorum=size)
    train(server, [size])
    if rank == leaver:
        server.leave()
        server.leave()
        error = raised(server.push, {}, 1)
        assert type(error) is InvalidArgumentError
    else:
        train(server, [size] * 3)
    meet()
    found, step = server.read("w"), server.step
    server.free()

    assert step == 4
    assert (found == -4 * size).all()


@pytest.mark.ranks(min=2)
def test_a_rank_that_leaves_frees_those_that_wait_for_it(comm, rank, size):
    server = start(comm, quorum=size)
    if rank == size - 1:
        while sum(server.tally().accepted) < size - 1:
            time.sleep(0.001)
        server.leave()
    else:
        train(server, [1])
    meet()
    step = server.step
    server.free()

    assert step == 1


@pytest.mark.parametrize("quorum", [None, 1])
def test_free_waits_for_those_who_still_train(comm, rank, size, quorum):
    server = start(comm, quorum=quorum)
    if rank == size - 1:
        time.sleep(0.05)
        train(server, [1, 2])
        found = server.read("w")
    server.free()

    if rank == size - 1:
        assert (found == -3).all()


def test_nobody_needs_to_train_at_all(comm, dedicated):
    server = start(comm, dedicated=dedicated)
    if server.only_serves:
        server.serve()
    server.free()
    server.free()


def test_serving_is_for_dedicated_hosts_only(comm, rank, dedicated):
    server = start(comm, dedicated=dedicated)
    if server.only_serves:
        server.serve()
    else:
        with pytest.raises(InvalidArgumentError, match="dedicated=True"):
            server.serve()
    server.free()


def test_without_threads_the_host_must_be_dedicated(comm, size, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    error = raised(start, comm)
    if size > 1:
        server = start(comm, dedicated=True)
        if server.only_serves:
            server.serve()
        server.free()

    assert type(error) is InvalidArgumentError
    assert "dedicated=True" in str(error)


def test_window_bytes_count_gradients_and_parameters(comm, size):
    server = start(comm, shapes={"w": (1000,)})
    held = sum(meet(server.window_bytes))
    server.free()

    # Two copies of the centre; a gradient of each rank.
    assert 8000 * (2 + size) <= held < 8000 * (2 + size) + 1024 * (1 + size)

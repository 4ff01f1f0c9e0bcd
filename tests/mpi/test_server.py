"""ParameterServer: in a thread or alone, with ranks that push and leave at will."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from hpcaccum import Group, InvalidArgumentError, WaitTimeoutError
from hpcaccum.mpi.runtime import MPI
from hpcaccum.server import client

from .acting import VAIN
from .serving import next_total, read, start, train
from .support import WAIT, for_some_pause
from .training import meet, raised, turns, watch_copies


@pytest.fixture(params=["threaded", "dedicated"])
def dedicated(request, size):
    if request.param == "dedicated" and size == 1:
        pytest.skip("a dedicated host needs 2 ranks")
    return request.param == "dedicated"


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
    found, step, tally = read(server, "w"), server.step, server.tally()
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
    found, step = read(server, "w"), server.step
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
    new = server.pull({"w": out}, at_least=server.step, known=0)
    server.free()

    assert (same, new) == (0, 1)
    assert (out == -1).all()


def test_a_pull_without_news_prepares_no_wait(comm, monkeypatch):
    server, waits = start(comm, updates=False), []
    with monkeypatch.context() as patch:
        patch.setattr(client, "Deadline", lambda *limit: waits.append(limit))
        assert server.pull({}, known=0) == 0
    server.free()

    assert waits == []


def test_only_what_is_asked_for_is_copied(comm):
    server = start(comm, shapes={"w": (3,), "v": (2, 2), "none": (0,), "one": ()})
    out = np.full((2, 2), 7.0)
    server.pull({"v": out})
    shapes = [read(server, name).shape for name in ("w", "v", "none", "one")]
    server.free()

    assert (out == 0).all()
    assert shapes == [(3,), (2, 2), (0,), ()]


def test_a_pull_waits_for_the_step_it_wants(comm, rank, size):
    server, out, steps = start(comm), np.zeros(3), itertools.count(1)

    def waits_for_rank_0(seconds):
        wanted, before = next(steps), server.waited
        meet()
        if rank == 0:
            time.sleep(seconds)
            train(server, [1])
        assert server.pull({"w": out}, at_least=wanted) == wanted
        assert (out == -wanted).all()
        return rank == 0 or server.waited - before > seconds / 2

    assert for_some_pause(waits_for_rank_0)
    server.free()


def test_a_pull_that_waits_too_long_names_what_is_missing(comm, size, monkeypatch):
    server = start(comm, host=size - 1)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.1")
    error = raised(server.pull, {}, at_least=3)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    server.free()

    assert type(error) is WaitTimeoutError
    assert f"for update 3 by rank {size - 1}, which is at step 0" in str(error)


def test_a_dedicated_host_is_not_waited_for(comm, size, monkeypatch, dedicated):
    server = start(comm, dedicated=dedicated, quorum=size - dedicated)
    errors = []
    if not server.only_serves:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.05")
        errors.append(raised(server.pull, {}, at_least=1))
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    meet()
    if server.only_serves:
        # No rank has left yet.
        with pytest.raises(WaitTimeoutError, match="nothing from") as caught:
            next_total(server._inbox, 0, 3, timeout=0.05)
        errors.append(caught.value)
    meet()
    server.leave()
    if server.only_serves:
        server.serve()
    server.free()

    first = 1 if dedicated else 0
    ranks = f"ranks {first}-{size - 1}" if size - first > 1 else f"rank {first}"
    for error in errors:
        assert type(error) is WaitTimeoutError
        assert f"(nothing from {ranks})" in str(error)


def test_a_server_that_idles_has_no_limit(comm, size, monkeypatch, dedicated):
    server = start(comm, dedicated=dedicated, quorum=size - dedicated)
    if server.only_serves:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.05")
        server.serve()
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    else:
        time.sleep(0.2)
        train(server, [1])
        server.leave()
    meet()
    step = server.step
    server.free()

    assert step == 1


def test_a_variable_without_gradients_is_left_alone(comm, rank):
    server = start(comm, shapes={"w": (3,), "v": (2,)})

    def act(_):
        receipt = server.push({"w": np.ones(3)}, 0)
        return server.pull({}, at_least=receipt.global_step + 1)

    turns([0], act)
    found = read(server, "w"), read(server, "v")
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
    found = read(server, "w"), read(server, "v")
    server.free()

    assert receipt
    np.testing.assert_allclose(found[0], -(size - 1) / 2, rtol=1e-15)
    np.testing.assert_allclose(found[1], -8, rtol=1e-15)


# Gradients that lie in the slot


@pytest.fixture
def copied(monkeypatch):
    """The names of the gradients that pushes of this rank copy."""
    return watch_copies(monkeypatch)


@pytest.mark.parametrize("quorum", [False, True], ids=["each", "mean"])
def test_what_lies_in_the_slot_is_not_copied(comm, rank, size, quorum, copied):
    server = start(comm, quorum=size if quorum else None, shapes={"w": (3,), "v": ()})
    for step in range(5):
        arrays = server.gradient_arrays()
        again = server.gradient_arrays()
        assert all(np.shares_memory(again[name], arrays[name]) for name in arrays)
        arrays["w"][:] = [1, step, rank]
        arrays["v"][...] = step
        receipt = server.push(again if step % 2 else arrays, server.step)
        server.pull({}, at_least=receipt.global_step + 1)
        meet()
    found, v = read(server, "w"), read(server, "v")
    server.free()

    many = 1 if quorum else size
    mean = (size - 1) / 2
    np.testing.assert_allclose(found, [-5 * many, -10 * many, -5 * mean * many])
    np.testing.assert_allclose(v, -10 * many)
    assert copied == []


def test_a_slot_is_kept_until_its_push_and_no_longer(comm, rank, size, copied):
    server = start(comm, quorum=2 * size)
    for value in (1, 3):
        arrays = server.gradient_arrays()
        arrays["w"][:] = value
        server.push(arrays, 0)
    later = server.gradient_arrays()
    # The first round is being reduced, or was: this must not change its mean.
    later["w"][:] = 100
    server.pull({}, at_least=1)
    meet()
    found = read(server, "w")
    server.push(later, 1)
    server.push({"w": np.zeros(3)}, 1)
    server.pull({}, at_least=2)
    meet()
    after = read(server, "w")
    server.free()

    assert (found == -2).all()
    assert (after == -52).all()
    assert copied == ["w"]


@pytest.mark.parametrize("quorum", [False, True], ids=["each", "mean"])
def test_arrays_that_were_pushed_are_read_only(comm, size, quorum):
    server = start(comm, quorum=size if quorum else None)
    arrays = server.gradient_arrays()
    arrays["w"][:] = 1
    receipt = server.push(arrays, 0)
    with pytest.raises(ValueError, match="read-only"):
        arrays["w"][:] = 2
    server.gradient_arrays()["w"][:] = 3
    server.pull({}, at_least=receipt.global_step + 1)
    meet()
    server.free()


@pytest.mark.parametrize("quorum", [False, True], ids=["each", "mean"])
def test_what_lies_elsewhere_is_copied_once(comm, rank, size, quorum, copied):
    # In the slot, but in the place of another gradient, or reversed in its own.
    quorum = size if quorum else None
    server = start(comm, quorum=quorum, shapes={"w": (3,), "v": (3,), "u": (3,)})
    arrays = server.gradient_arrays()
    arrays["w"][:], arrays["v"][:], arrays["u"][:] = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    crossed = {"w": arrays["v"], "v": arrays["w"], "u": arrays["u"][::-1]}
    receipt = server.push(crossed, 0)
    server.pull({}, at_least=receipt.global_step + 1)
    meet()
    found = [(-read(server, name)).tolist() for name in "wvu"]
    server.free()

    if quorum:
        np.testing.assert_allclose(found, [[4, 5, 6], [1, 2, 3], [9, 8, 7]])
    else:
        np.testing.assert_allclose(found[0], np.multiply(size, [4, 5, 6]))
        np.testing.assert_allclose(found[1], np.multiply(size, [1, 2, 3]))
        np.testing.assert_allclose(found[2], np.multiply(size, [9, 8, 7]))
    assert copied == ["w", "v", "u"]


@pytest.mark.parametrize("quorum", [False, True], ids=["each", "mean"])
def test_what_is_left_in_the_slot_of_a_missing_one_does_not_count(
    comm, rank, size, quorum
):
    server = start(comm, quorum=size if quorum else None, shapes={"w": (), "v": ()})
    for value in server.gradient_arrays().values():
        value[...] = 7
    grads = server.gradient_arrays()
    if rank:
        del grads["v"]
    receipt = server.push(grads, 0)
    server.pull({}, at_least=receipt.global_step + 1)
    meet()
    found = float(read(server, "w")), float(read(server, "v"))
    server.free()

    np.testing.assert_allclose(found, (-7 if quorum else -7 * size, -7), rtol=1e-14)


@pytest.mark.parametrize("leaver", ["first", "last"])
@pytest.mark.ranks(min=2)
def test_a_rank_may_leave_while_others_go_on(comm, rank, size, leaver):
    # Also the root: it then only serves.
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
    found, step = read(server, "w"), server.step
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
def test_free_waits_for_ranks_that_still_train(comm, rank, size, quorum):
    server = start(comm, quorum=quorum)
    if rank == size - 1:
        time.sleep(0.05)
        train(server, [1, 2])
        found = read(server, "w")
    server.free()

    if rank == size - 1:
        assert (found == -3).all()


def test_no_rank_has_to_train(comm, dedicated):
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
        text = f"rank {rank} is not a server" if dedicated else "dedicated=True was not"
        with pytest.raises(InvalidArgumentError, match=text):
            server.serve()
    server.free()


def test_without_threads_the_host_must_be_dedicated(comm, size, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    error = raised(start, comm)
    one_node = Group.of(comm).single_node
    if size > 1 and one_node:
        server = start(comm, dedicated=True)
        if server.only_serves:
            server.serve()
        server.free()

    assert type(error) is InvalidArgumentError
    assert "MPI_THREAD_MULTIPLE" in str(error)
    assert ("dedicated=True" in str(error)) == one_node


def test_window_bytes_count_gradients_and_parameters(comm, size):
    server = start(comm, shapes={"w": (1000,)})
    held = sum(meet(server.window_bytes))
    server.free()

    # On each node two copies of the center; a gradient of each rank; on the root's node
    # a gradient of other nodes.
    nodes = len(Group.of(comm).nodes)
    least = 8000 * (2 * nodes + size + (nodes > 1))
    assert least <= held < least + 1024 * (1 + size)


def test_push_after_one_that_failed_waits_for_its_empty_update(comm, rank, monkeypatch):
    server = start(comm, initial={"w": np.zeros(3)}, updates=False)
    # The root: an agent submits the gradients of other nodes.
    words, ones, root = server._inbox.words, {"w": np.ones(3)}, rank == 0
    failures = iter([MemoryError])
    store = words.store

    def fail_once(*args):
        for failure in failures:
            raise failure
        store(*args)

    if root:
        monkeypatch.setattr(words, "store", fail_once)
        errors = [raised(server.push, ones, 0)]
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
        # Its mark would be overwritten, and the server would wait for it.
        errors.append(raised(server.push, ones, 0))
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    meet()
    if root:
        center = server.center["w"]
        server.start(lambda grads, rate: lambda: np.subtract(center, 1, center))
        train(server, [1])
    meet()
    found, tally = read(server, "w"), server.tally()
    server.free()

    assert found.tolist() == [-1] * 3
    assert (tally.accepted[0], tally.given_up[0]) == (1, 1)
    if root:
        assert [type(error) for error in errors] == [MemoryError, WaitTimeoutError]
        assert "update 1, this rank's last" in str(errors[1])

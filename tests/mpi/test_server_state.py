"""ParameterServer: its state, from which another one continues."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from hpcaccum import (
    DisagreementError,
    Group,
    InvalidArgumentError,
    Receipt,
    Tally,
    WaitTimeoutError,
)
from hpcaccum.deadline import Deadline
from hpcaccum.server import Parameters

from .acting import VAIN
from .serving import read, start, train
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


def options_of(inbox, size, dedicated):
    quorum = size - dedicated if inbox == "quorum" else None
    return {"quorum": quorum, "dedicated": dedicated}


@pytest.mark.parametrize("inbox", ["quorum", "each"])
def test_a_server_continues_at_a_given_step(comm, rank, size, inbox, dedicated):
    server = start(comm, step=1000, **options_of(inbox, size, dedicated))
    out = np.full(3, 7.0)
    begun = server.pull({"w": out}), out[0], server.step
    meet()
    receipts = []
    if server.only_serves:
        server.serve()
    else:
        receipts = train(server, [1, 1])
    server.free()

    workers = size - dedicated
    updates = 2 if inbox == "quorum" else 2 * workers
    assert begun == (1000, 0, 1000)
    assert server.step == 1000 + updates
    assert (read(server, "w") == -updates).all()
    # One gradient made each step, none was skipped.
    steps = sorted(r.global_step for each in meet(receipts) for r in each)
    each = workers if inbox == "quorum" else 1
    assert steps == sorted(list(range(1000, 1000 + updates)) * each)
    if inbox == "quorum":
        assert all(receipt.lag == 0 for receipt in receipts)
    else:
        # Between a rank's pull and its push, the others may make all of theirs.
        others = 2 * (workers - 1)
        assert all(0 <= receipt.lag <= others for receipt in receipts)


@pytest.mark.parametrize("inbox", ["quorum", "each"])
def test_lags_are_those_to_the_given_step(comm, size, inbox):
    server = start(comm, step=1000, quorum=1 if inbox == "quorum" else None)

    def late(_):
        return server.push({"w": np.ones(3)}, 990)

    [receipt] = turns([size - 1], late)
    server.free()

    assert receipt == Receipt(inbox == "each", 990, 1000)
    assert server.tally().lags == {10: 1}


@pytest.mark.parametrize("version", [1000, 1001])
def test_parameters_start_at_any_step(comm, rank, version):
    group, out = Group.of(comm), np.zeros(3)
    buffer = Parameters(group, 0, 3, np.float64, "test")
    if rank == 0:
        buffer.publish(lambda flat: flat.fill(version), version)
    for newest in (version, version + 1, version + 2):
        meet()
        copy = Deadline(WAIT, "test")
        buffer.wait(newest, copy, str)
        assert buffer.read(lambda flat: np.copyto(out, flat), copy) == newest
        assert (out == newest).all()
        meet()
        if rank == 0:
            buffer.publish(lambda flat: flat.fill(newest + 1), newest + 1)  # noqa: B023
    meet()
    buffer.free()


@pytest.mark.parametrize("inbox", ["quorum", "each"])
def test_a_second_server_continues_where_the_first_one_was(comm, rank, size, inbox):
    quorum = size if inbox == "quorum" else None
    first = start(comm, quorum=quorum, shapes={"w": (3,), "v": (2,)})
    train(first, [1, 2])
    meet()
    state = meet(first.state() if rank == 0 else None)[0]
    train(first, [3])
    first.free()
    step, tally, center = state
    second = start(comm, quorum=quorum, initial=center, step=step, tally=tally)
    found = second.tally()
    meet()
    train(second, [4])
    second.free()

    updates = 1 if inbox == "quorum" else size
    assert step == 2 * updates
    assert (center["w"] == -3 * updates).all()
    assert (center["v"] == 0).all()
    assert (read(second, "w") == -7 * updates).all()
    assert (read(second, "v") == 0).all()
    assert found == tally
    assert found.accepted == (2,) * size
    assert second.tally().accepted == (3,) * size
    assert sum(second.tally().lags.values()) == 3 * size
    assert second.step == 3 * updates


def test_the_state_is_a_copy_also_after_the_end(comm, rank):
    server = start(comm)
    train(server, [1])
    meet()
    if rank == 0:
        server.state().center["w"][:] = 7
    else:
        error = raised(server.state)
        assert type(error) is InvalidArgumentError
        assert "call it on rank 0" in str(error)
    server.free()
    final = server.state()
    final.center["w"][:] = 7

    assert (read(server, "w") == -final.step).all()
    assert (final.step, final.tally) == (server.step, server.tally())


def test_counts_of_another_number_of_ranks_are_added(comm, size):
    earlier = Tally((5,) * (size + 1), (1,), {0: 9, 2: 1}, ())
    server = start(comm, tally=earlier)
    train(server, [1])
    server.free()
    tally = server.tally()

    assert tally.accepted == (6,) * size + (5,)
    assert tally.dropped == (1,) + (0,) * (size - 1)
    assert tally.given_up == (0,) * size
    assert sum(tally.lags.values()) == 10 + size
    assert tally.lags[0] >= 10


@pytest.mark.parametrize(
    "step", [-1, 1 << 40, None], ids=["negative", "large", "different"]
)
def test_a_step_that_cannot_be_is_refused_on_all_ranks(comm, rank, size, step):
    if step is None and size == 1:
        pytest.skip("one rank agrees with itself")
    error = raised(start, comm, step=rank if step is None else step)

    assert type(error) is (DisagreementError if step is None else InvalidArgumentError)
    assert "step must be" in str(error)


def test_a_last_update_that_takes_too_long_is_named(comm, rank, size, monkeypatch):
    server, go = start(comm, updates=False), threading.Event()
    with monkeypatch.context() as patch:
        if rank == 0:
            server.start(lambda grads, rate: lambda: go.wait(WAIT))
            server.push({"w": np.ones(3)}, 0)
            # The limit of this wait only: the other ranks may be late.
            loop, end = server._role, server._role.end
            patch.setattr(loop, "end", lambda each: end(Deadline(VAIN, each.what)))
        error = raised(server.free)
    go.set()
    server.free()

    assert type(error) is (WaitTimeoutError if rank == 0 else RuntimeError)
    assert re.search(r"free: (rank 0: )?waited", str(error))
    assert "for the last updates of this rank, at step 0, which waits for" in str(error)
    assert server.step == 1


def test_a_push_and_a_pull_share_a_buffer_on_the_device(cp, comm, rank):
    count = 1 << 16
    server = start(comm, shapes={"w": (count,), "v": ()})
    pool = cp.get_default_memory_pool()
    grads = {"w": cp.full(count, 2.0), "v": cp.full((), 3.0)}
    into = {"w": cp.zeros(count), "v": cp.zeros(())}
    before = pool.used_bytes()
    for _ in range(3):
        receipt = server.push(grads, server.step)
        step = server.pull(into, at_least=receipt.global_step + 1)
        assert (into["w"].get() == -2 * step).all()
        assert into["v"].get() == -3 * step
    held = pool.used_bytes() - before
    server.free()

    assert 8 * count <= held < 12 * count
    assert pool.used_bytes() == before

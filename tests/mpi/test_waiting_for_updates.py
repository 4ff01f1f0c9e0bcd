"""The error of a worker that waits too long for an update names what is missing."""

import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import WaitTimeoutError
from hpcaccum.errors import format_ranks
from tests import internals

from .acting import VAIN, WAIT, Background, interrupted, until
from .training import ONE_SIDED, Gate, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size


def push_in_vain(opt, step, brings, in_vain):
    """Let some ranks push, and when all have, pull what is missing; return why."""
    if brings:
        internals.push(opt, {"w": np.ones(())}, step)
    meet()
    message = in_vain(internals.wait_for, opt, step + 1) if brings else ""
    meet()
    return message


@pytest.mark.ranks(min=2)
def test_ranks_whose_gradients_are_missing_are_named(comm, rank, size, in_vain):
    w, late = variable(), size - 1
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm, host=late) as opt:
        opt.initialize([w])
        opt.minimize(gives(1.0))
        message = push_in_vain(opt, 1, rank != late, in_vain)
        if rank == late:
            opt.minimize(gives(1.0))
        # A rank that leaves before would shrink the quorum.
        meet()
    if rank != late:
        assert f"for update 2 by rank {late}, which is at step 1; the " in message
        assert "the next one waits for" in message
        assert f"{size} gradients at step 1, had {size - 1} " in message
        text = (
            f"(nothing from rank {late}); no rank has left; call leave() when a rank "
        )
        assert message.endswith(text + "has no more data")
    assert w.value == -2


@pytest.mark.ranks(min=3)
def test_ranks_that_left_are_not_missing(comm, rank, size, in_vain):
    w, late, message = variable(), size - 1, ""
    with started(hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm), [w]) as opt:
        if rank == 1:
            opt.leave()
        until(lambda: internals.left(opt) == [1])
        message = push_in_vain(opt, 0, rank not in (1, late), in_vain)
        if rank == late:
            opt.minimize(gives(1.0))
    if message:
        assert f"{size - 1} gradients at step 0, had {size - 2} " in message
        assert f"(nothing from rank {late}); rank 1 has left" in message


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_server_that_is_behind_is_named(comm, rank, size, kind, in_vain):
    go, w, host = threading.Event(), variable(), size - 1
    # The inner optimizer of AGN makes local updates too: only the center waits.
    gate = Gate(lambda: None if threading.current_thread() is main else go.wait(WAIT))
    main = threading.current_thread()
    with started(ONE_SIDED[kind](gate, [w], comm, host=host, name="mine"), [w]) as opt:
        pairs = opt.compute_gradients(gives(1.0))
        meet()
        # Also a busy agent answers in that time.
        message = in_vain(
            lambda: [opt.minimize(gives(1.0)) for _ in range(2)], seconds=10 * VAIN
        )
        slot = in_vain(opt.apply_gradients, pairs) if kind == "DropStale" else ""
        meet()
        go.set()
    assert not slot or f"this rank's last, by rank {host}" in slot
    assert message.startswith("mine: pull: waited ")
    assert f"by rank {host}, which is at step 0; the next one waits" in message
    assert f"for rank {host}, which has all gradients that it needs;" in message


@pytest.mark.ranks(min=2)
def test_a_rank_that_does_not_finish_writing_is_named(comm, rank, size, in_vain):
    # The host: gradients of other nodes are in place when they are admitted.
    w, slow, go = variable(np.zeros(2)), 0, threading.Event()
    with started(hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm), [w]) as opt:
        late = internals.before_records(opt, lambda: rank != slow or go.wait(WAIT))
        with late:
            push = Background(slow, lambda: opt.minimize(gives(np.ones(2))))
            message = ""
            if rank != slow:
                # Also a busy agent answers in that time.
                minimize = opt.minimize, gives(np.ones(2))
                message = in_vain(*minimize, seconds=10 * VAIN)
            # All are admitted, which closes the round, and all but one have written.
            until(lambda: internals.admitted_step(opt) == 1)
            meet()
            seen = internals.missing(opt, 1)
            meet()
            go.set()
            push.result()
    assert f"waits for rank {slow}, admitted to the round, to finish writing" in seen
    assert rank == slow or "for update 1 by rank 0, which is at step 0;" in message


@pytest.mark.ranks(min=2)
def test_a_gradient_that_was_admitted_and_not_written_is_reported(
    comm, rank, size, in_vain
):
    w = variable()
    with started(hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=comm), [w]) as opt:
        nothing = in_vain(internals.wait_for, opt, 1)
        meet()
        write = internals.admit_update(opt) if rank == 1 else None
        meet()
        message = in_vain(internals.wait_for, opt, 1)
        meet()
        if write is not None:
            write()
    everybody = format_ranks(range(size))
    assert f"a gradient, which may come from {everybody}" in nothing
    assert f"one of {everybody}, whose gradient was admitted, to write it" in message
    assert opt.global_step == 1


def test_a_last_update_that_takes_too_long_is_named(comm, rank, monkeypatch):
    w, go = variable(), threading.Event()
    opt = hpc.DropStaleGradientOptimizer(Gate(lambda: go.wait(WAIT)), 9, comm=comm)
    opt.initialize([w])
    if rank == 0:
        internals.push(opt, {"w": np.ones(())}, 0)
    opt.leave()
    meet()
    with monkeypatch.context() as patch:
        if rank == 0:
            # The others may be late.
            patch.setenv("HPCACCUM_TIMEOUT", str(10 * VAIN))
        error = raised(opt.free)
    go.set()
    opt.free()

    assert type(error) is WaitTimeoutError
    assert "for the last updates of this rank, at step 0, which waits for" in str(error)
    assert opt.global_step == 1


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("which", [0, -1])
def test_a_rank_goes_on_after_an_interrupted_wait(comm, rank, size, which):
    w = variable()
    with started(hpc.SyncReplicasOptimizer(hpc.SGD(1), size, comm=comm), [w]) as opt:
        if rank == which % size:
            # Its gradient is accepted; the others have given none.
            interrupted(opt.minimize, gives(1.0))
        meet()
        if rank != which % size:
            opt.minimize(gives(1.0))
        meet()
        opt.minimize(gives(1.0))
        assert w.value == -2

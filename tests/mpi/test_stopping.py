"""The common last step of ranks that are asked to stop."""

import os
import signal
import sys

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import group_of
from hpcaccum.errors import RESTART
from hpcaccum.stopping import INTERRUPTED

from ..common import check_error
from .acting import in_threads
from .reducing import made_up
from .training import ONE_SIDED, meet, raised

NODES = "real", "each on its own"


@pytest.fixture(params=NODES)
def group(request, comm, size):
    """The ranks on their nodes, and each on one of its own."""
    if request.param == "real":
        return group_of(comm)
    if size == 1:
        pytest.skip("needs 2 ranks, for two nodes")
    return made_up(comm, "singles")


@pytest.fixture(autouse=True)
def handlers():
    """Signals do afterwards what they did before."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def steps(group, asked, who, number=signal.SIGTERM):
    """Make steps together until all stop; one rank is asked at one of them."""
    step = 5
    with hpc.Stopping(group) as stop:
        while not stop.agreed(step):
            if step == asked and group.rank == who % group.size:
                signal.raise_signal(number)
            # The exchange of gradients: nobody ends a step before all have begun it.
            group.allgather(None, "step")
            step += 1
    return step, stop.status


@pytest.mark.parametrize("who", [0, -1])
@pytest.mark.parametrize("asked", [5, 6, 40])
def test_all_stop_after_the_same_step(group, asked, who):
    last, status = steps(group, asked, who)

    assert meet((last, status)) == [(last, status)] * group.size
    assert status == RESTART
    assert last in (asked + 1, asked + 2)


def test_ctrl_c_has_a_status_of_its_own(comm):
    assert steps(group_of(comm), 6, 0, signal.SIGINT)[1] == INTERRUPTED


def test_a_second_ctrl_c_interrupts(comm):
    with hpc.Stopping(comm) as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.status == 0


def test_without_a_request_nobody_stops(comm):
    with hpc.Stopping(comm, time_limit="1h") as stop:
        assert not any(stop.agreed(step) for step in range(100))
    assert stop.status == 0
    assert str(raised(stop.agreed, 100)) == "Stopping was freed"


@pytest.mark.parametrize("limit", [1e-3, "0.001s"])
def test_the_clock_of_any_rank_asks(comm, rank, size, limit):
    limits = [None, limit] if size > 1 else [limit]
    step = 0
    with hpc.Stopping(comm, time_limit=limits[min(rank, 1) % len(limits)]) as stop:
        while not stop.agreed(step):
            comm.Barrier()
            step += 1
    assert stop.status == RESTART
    assert len(set(meet(step))) == 1


@pytest.mark.parametrize("limit", ["soon", "5", "-1s", 0, float("nan"), [1]])
def test_an_invalid_time_is_an_error_on_all_ranks(comm, rank, limit):
    with pytest.raises(hpc.InvalidArgumentError, match="must look like 90s, 5m or 1h"):
        hpc.Stopping(comm, time_limit=limit if rank == 0 else None)


def test_only_the_main_thread_gets_signals(comm):
    check_error(*in_threads(lambda: raised(hpc.Stopping, comm)), "main thread")


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_ranks_of_a_server_stop_together(comm, rank, size, dedicated, kind):
    if size - dedicated < 1:
        pytest.skip("needs a rank that trains")
    w, calls = hpc.Variable(np.zeros(4), "w"), 0
    opt = ONE_SIDED[kind](hpc.SGD(0.1), [w], comm, dedicated=dedicated)
    with hpc.Stopping(comm) as stop, opt:
        opt.initialize([w])
        if dedicated and rank == 0:
            opt.serve(stop.agreed)
        else:
            while not stop.agreed(opt.global_step):
                calls += 1
                if rank == size - 1 and calls == 7:
                    signal.raise_signal(signal.SIGTERM)
                opt.minimize(lambda: (0.0, [np.ones(4)]))
    assert meet(stop.status) == [RESTART] * size
    assert len({tuple(each) for each in meet(w.value.tolist())}) == 1


@pytest.mark.parametrize(("number", "asks"), [("SIGTERM", True), ("SIGINT", False)])
def test_the_end_of_the_program_asks_for_the_next_start(
    comm, tmp_path, monkeypatch, number, asks
):
    file = comm.bcast(tmp_path / "again")
    monkeypatch.setitem(os.environ, "REQUEUE_FILE", str(file))
    stop = hpc.Stopping(comm)

    def program():
        with stop:
            signal.raise_signal(getattr(signal, number))
            for step in range(3):
                if stop.agreed(step):
                    sys.exit(stop.status)
                comm.Barrier()

    with pytest.raises(SystemExit):
        program()
    comm.Barrier()
    stop.free()

    assert file.exists() is asks
    if asks:
        # `hpcaccum run` starts it again at once if there is a word in the file.
        assert file.read_text() == ""

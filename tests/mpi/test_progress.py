"""Progress: gradients of other nodes arrive while the host rank computes."""

import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.deadline import MOVING_NAP
from hpcaccum.mpi.talk.progress import Progress, short_switch_interval
from tests import internals

from .acting import at
from .support import WAIT
from .training import meet

# They look at whole windows.
pytestmark = [pytest.mark.own_comm, pytest.mark.any_size]


def multiply():
    block = np.ones((300, 300), np.float32)
    block @ block


def count():
    sum(number for number in range(20_000))


@pytest.mark.parametrize("work", [multiply, count])
@pytest.mark.ranks(min=2)
def test_gradients_arrive_while_the_host_computes(comm, rank, size, work, tmp_path):
    acc = hpc.ConditionalAccumulator("float32", (1 << 20,), storage="slots", comm=comm)
    grad, [arrived, *_] = np.full(1 << 20, rank, np.float32), meet(tmp_path)
    if rank == 0:
        end = time.monotonic() + WAIT
        # It makes no call of MPI until all ranks have said in files that they are done.
        while len([*arrived.iterdir()]) < size - 1 and time.monotonic() < end:
            work()
        assert time.monotonic() < end
    else:
        acc.apply_grad(grad)
        (arrived / str(rank)).touch()
    meet()
    if rank == 0:
        mean = acc.take_grad(size - 1, timeout=WAIT)
        assert (mean == size / 2).all()
    acc.free()


@pytest.mark.ranks(min=2)
def test_naps_are_short_while_another_node_adds_to_a_sum(group, rank, size):
    acc = hpc.ConditionalAccumulator("float64", (2,), storage="sum", comm=group)

    def nap():
        meet()
        return at(0, group.progress.nap, math.inf)

    before = nap()
    write = internals.admit(acc) if rank == size - 1 else None
    during = nap()
    if write is not None:
        write([1, 2])
    assert during == MOVING_NAP < min(before, nap())
    acc.free()


def test_switch_interval_is_short_while_it_has_users():
    before = sys.getswitchinterval()
    during = pytest.approx(1e-3)
    with short_switch_interval():
        with short_switch_interval():
            assert sys.getswitchinterval() == during
        assert sys.getswitchinterval() == during
    assert sys.getswitchinterval() == pytest.approx(before)
    # A shorter one of the user is kept.
    sys.setswitchinterval(1e-4)
    short = sys.getswitchinterval()
    with short_switch_interval():
        assert sys.getswitchinterval() == short
    sys.setswitchinterval(before)


def test_naps_are_long_where_no_word_changes(monkeypatch):
    words, clock = bytearray(8), SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("hpcaccum.mpi.talk.progress.time", clock)
    progress = Progress()
    end = progress.watch(lambda: memoryview(words))
    first, naps = progress.nap(math.inf), [progress.nap(1e-4)]
    for _ in range(2):
        clock.now += 1.0
        naps.append(progress.nap(math.inf))
        words[0] += 1
    naps.append(progress.nap(math.inf))
    end()
    clock.now += 1.0
    naps += progress.nap(math.inf), progress.nap(1e-4)

    # It is needed for something else; nothing has changed; something has, twice.
    assert naps[0] < 1e-4
    assert naps[1:4] == [5e-3, first, first]
    assert first < 1e-3
    assert naps[5] == naps[0]

"""Progress: gradients of other nodes arrive while the host rank computes."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.mpi.memory.region import Region
from hpcaccum.mpi.talk.progress import Progress, short_switch_interval

from .on_nodes import group_on_nodes  # noqa: F401
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


def test_switch_interval_is_short_while_it_has_users():
    before = sys.getswitchinterval()
    during = pytest.approx(1e-3)
    with short_switch_interval():
        with short_switch_interval():
            assert sys.getswitchinterval() == during
        assert sys.getswitchinterval() == during
    assert sys.getswitchinterval() == pytest.approx(before)


def test_shorter_switch_interval_of_the_user_is_kept():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    short = sys.getswitchinterval()
    with short_switch_interval():
        during = sys.getswitchinterval()
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)

    assert (during, after) == (short, short)


class Clock:
    """Stands for the module `time`."""

    now = 0.0

    def monotonic(self):
        return self.now


def test_naps_are_long_where_no_word_changes(monkeypatch):
    words, clock = bytearray(8), Clock()
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


def test_naps_are_short_while_data_arrive():
    arrives, progress, naps = [False], Progress(), []
    end = progress.expect(lambda: arrives[0])
    for arrives[0] in (False, True, False):
        naps.append(progress.nap(math.inf))
    end()
    arrives[0] = True
    naps.append(progress.nap(math.inf))

    assert naps[1] < 50e-6 < naps[0]
    assert naps[2:] == [naps[0]] * 2 or naps[2:] == [5e-3] * 2


class Paused:
    """A window that meets the other ranks twice before it adds a vector."""

    def __init__(self, window, vector):
        self._window, self._vector = window, vector

    def __getattr__(self, name):
        return getattr(self._window, name)

    def Accumulate(self, origin, root, *rest):
        if np.shares_memory(origin[0], self._vector):
            self._window.Flush(root)
            meet()
            meet()
        self._window.Accumulate(origin, root, *rest)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("count", "announced"), [(16, False), (1 << 18, True)])
def test_ranks_announce_long_additions(group, monkeypatch, count, announced):
    region, found = Region(group, 0, 4 * count), [announced, False]
    vector = np.ones(count, np.float32)
    if group.rank == group.size - 1:
        monkeypatch.setattr(region, "_window", Paused(region._window, vector))
        region.accumulate(0, vector)
        # The announcement of the end is complete with the next operation.
        region.get(0, vector)
        meet()
    else:
        for place in range(2):
            meet()
            if group.rank == 0:
                found[place] = group.progress._data_arrive()
            meet()
    monkeypatch.undo()
    if group.rank == group.size - 1:
        meet()
    region.free()

    assert found == [announced, False]
    assert (vector == 1).all()

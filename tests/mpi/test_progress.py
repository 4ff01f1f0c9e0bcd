"""Progress: gradients of other nodes arrive while the host rank computes."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.accumulator.state import Record
from hpcaccum.mpi import AtomicWords
from hpcaccum.mpi.progress import ProgressThread, short_switch_interval
from hpcaccum.mpi.region import Region

from .acting import until
from .on_nodes import group_on_nodes  # noqa: F401
from .support import WAIT
from .training import meet

# They look at whole windows.
pytestmark = pytest.mark.own_comm


def multiply():
    block = np.ones((300, 300), np.float32)
    block @ block


def count():
    sum(number for number in range(20_000))


@pytest.mark.parametrize("work", [multiply, count])
@pytest.mark.ranks(min=2)
def test_gradients_arrive_while_the_host_computes(comm, rank, size, work):
    acc = hpc.ConditionalAccumulator("float32", (1 << 20,), storage="slots", comm=comm)
    # The memory of the host rank, which makes no MPI call between the two exchanges.
    words = np.frombuffer(acc._protocol.words._window.tomemory() or b"", np.int64)
    records = None
    grad, arrived = np.full(1 << 20, rank, np.float32), None
    meet()
    if rank == 0:
        end = time.monotonic() + WAIT
        records = words[acc._protocol.record_index(0, 1) :][: size - 1]
        while arrived != size - 1 and time.monotonic() < end:
            work()
            arrived = sum(Record.of(int(word)).number for word in records)
    else:
        acc.apply_grad(grad)
    meet()
    if rank == 0:
        mean = acc.take_grad(size - 1, timeout=WAIT)
        assert (mean == size / 2).all()
    del words, records
    acc.free()

    assert arrived in (None, size - 1)


def nothing():
    return memoryview(b"")


def test_switch_interval_is_short_while_it_runs(comm):
    before = sys.getswitchinterval()
    # Threads of objects that several tests use.
    users = short_switch_interval._users
    progress = [ProgressThread(comm) for _ in range(2)]
    during = pytest.approx(1e-3)
    progress[0].start(nothing)
    # The thread itself sets it.
    until(lambda: sys.getswitchinterval() == during)
    progress[1].start(nothing)
    until(lambda: short_switch_interval._users == users + 2)
    assert sys.getswitchinterval() == during
    progress[0].stop(nothing)
    assert sys.getswitchinterval() == during
    progress[1].stop(nothing)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_shorter_switch_interval_of_the_user_is_kept(comm):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    short = sys.getswitchinterval()
    progress = ProgressThread(comm)
    progress.start(nothing)
    during = sys.getswitchinterval()
    progress.stop(nothing)
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)

    assert (during, after) == (short, short)


class Clock:
    """Stands for the module `time`, and for naps, which take no time.

    Args:
        after: Called with the number of naps after each; returns whether it is the
            last.
    """

    def __init__(self, after):
        self.naps, self._now, self._after = [], 0.0, after

    def monotonic(self):
        return self._now

    def nap(self, seconds):
        self._now += seconds
        self.naps.append(round(seconds, 9))
        return self._after(len(self.naps))


def test_naps_are_long_where_no_word_changes(comm, monkeypatch):
    words, progress = bytearray(16), ProgressThread(comm)

    def after(nap):
        words[8] = nap >= 3000
        return nap == 3010

    progress._end = clock = Clock(after)
    monkeypatch.setattr("hpcaccum.mpi.progress.time", clock)
    progress._windows = [lambda: memoryview(words)]
    progress._run()

    first = clock.naps[0]
    assert first < 1e-3
    assert clock.naps[:50] == [first] * 50
    assert clock.naps[:3000] == sorted(clock.naps[:3000])
    assert clock.naps[2999] == 5e-3
    # The change is seen after the nap.
    assert clock.naps[3000:] == [first] * 10


def test_another_thread_replaces_it_and_naps_in_the_same_way(comm, monkeypatch):
    words, progress = bytearray(8), ProgressThread(comm)
    clock = Clock(lambda nap: False)
    monkeypatch.setattr("hpcaccum.mpi.progress.time", clock)
    progress.replace(True)
    progress.start(lambda: memoryview(words))
    started = progress._thread
    first, naps = progress.nap(math.inf), [progress.nap(1e-4)]
    for after in [1.0, 1.0]:
        clock.nap(after)
        naps.append(progress.nap(math.inf))
        words[0] += 1
    naps.append(progress.nap(math.inf))
    progress.replace(False)
    resumed = progress._thread
    progress.stop(progress._windows[0])

    assert started is None is not resumed
    # It is needed for something else; nothing has changed; something has, twice.
    assert naps[0] < 1e-4
    assert naps[1:] == [5e-3, first, first]
    assert first < 1e-3


@pytest.mark.ranks(min=2)
def test_words_that_are_in_use_are_watched(comm, rank):
    group = Group.of(comm)
    if group.single_node:
        pytest.skip("needs ranks on several nodes")
    words, more = (AtomicWords(group, 0, 1) for _ in range(2))
    progress, seen = group.progress, []
    if rank == 0:
        # This thread looks instead.
        progress.replace(True)
        for place in [more._first, words._first, None, 4000, more._first, None]:
            progress._unchanged()
            if place is not None:
                words._shared.words[place] += 1
            seen.append(progress._unchanged() == 0)
        progress.replace(False)
    meet()
    more.free()
    words.free()

    assert seen == [True, True, False, False, True, False][: len(seen)]


def test_naps_are_short_where_changes_cannot_be_seen(comm, monkeypatch):
    progress = ProgressThread(comm)

    progress._end = clock = Clock(lambda nap: nap == 3000)
    monkeypatch.setattr("hpcaccum.mpi.progress.time", clock)
    progress._windows = [
        lambda: memoryview(bytearray(8)),
        lambda: memoryview(bytearray(1 << 20)),
    ]
    progress._run()

    assert set(clock.naps) == {clock.naps[0]}
    assert clock.naps[0] < 1e-3


def test_naps_are_short_while_data_arrive(comm):
    progress, arrives = ProgressThread(comm), [False]
    memory = memoryview(bytearray(1 << 20))
    # This thread asks instead.
    progress.replace(True)
    progress.start(lambda: memory, lambda: arrives[0])
    naps = []
    for arrives[0] in (False, True, False):
        naps.append(progress.nap(math.inf))
    arrives[0] = True
    progress.stop(progress._windows[0])
    naps.append(progress.nap(math.inf))

    assert naps[1] < 50e-6 < naps[0] == naps[2]
    # The window is not asked any more.
    assert naps[3] > 50e-6


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

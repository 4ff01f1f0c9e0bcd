"""The simulated NCCL is late, and notices what NCCL would not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
import pytest

from .simulated import (
    ONLY_SIMULATED,
    RuntimeFailure,
    latest,  # noqa: F401
    poisoned,
    ready,
)

pytestmark = ONLY_SIMULATED

nccl = cupy.cuda.nccl


def queue_sum(comm, source, target, *, count=None, stream=None):
    stream = cupy.cuda.get_current_stream() if stream is None else stream
    count = source.size if count is None else count
    kind = nccl.NCCL_FLOAT32
    places = source.data.ptr, target.data.ptr
    comm.allReduce(*places, count, kind, nccl.NCCL_SUM, stream.ptr)


@pytest.fixture
def alone():
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    yield comm
    comm.destroy()


class Together:
    """Queues the sums of two threads without other work of the simulator in between.

    It may do work of one thread in the other, which would wait there for the sum that
    this one has not queued yet. Ranks that are processes have a simulator each.
    """

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=30)

    def queue_sum(self, *args, **options):
        self._barrier.wait()
        queue_sum(*args, **options)
        self._barrier.wait()


def on_two(monkeypatch, work, devices=(0, 1)):
    """Return what two ranks, which are threads, return or raise."""
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")
    identity = nccl.get_unique_id()

    def run(rank):
        cupy.cuda.Device(devices[rank]).use()
        try:
            comm = nccl.NcclCommunicator(2, identity, rank)
            result = work(comm, rank)
            comm.destroy()
            return result
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_a_sum_is_late(alone):
    source, target = ready([1, 2, 3]), cupy.empty(3, np.float32)
    cupy.cuda.Device().synchronize()
    queue_sum(alone, source, target)

    assert poisoned(target)
    assert target.get().tolist() == [1, 2, 3]


def test_a_sum_comes_after_earlier_work_of_its_stream_only(alone):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with streams[0]:
        source = cupy.full(3, 5, np.float32)
        queue_sum(alone, source, source)
        assert source.get().tolist() == [5, 5, 5]
        other = cupy.full(3, 5, np.float32)
    queue_sum(alone, other, source, stream=streams[1])
    with streams[1]:
        assert not (source.get() == 5).any()


def test_an_input_that_changes_too_early_is_an_error(alone):
    source, target = ready([1, 2, 3]), cupy.empty(3, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    queue_sum(alone, source, target, stream=stream)
    source.fill(9)
    cupy.cuda.Stream.null.synchronize()
    with pytest.raises(RuntimeFailure, match="changed before its end"):
        stream.synchronize()


def test_a_communicator_is_not_destroyed_before_its_sums(alone):
    source = ready([1, 2, 3])
    queue_sum(alone, source, source)
    alone.destroy()
    with pytest.raises(RuntimeFailure, match="destroyed before its sum"):
        source.get()
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        queue_sum(alone, source, source)


def test_memory_of_the_host_is_refused(alone):
    host = np.ones(3, np.float32).ctypes.data
    with pytest.raises(nccl.NcclError, match="not on the device"):
        alone.allReduce(host, host, 3, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)


@pytest.mark.slow
def test_ranks_on_one_device_are_an_error(monkeypatch):
    monkeypatch.setattr(nccl, "_PATIENCE", 5.0)
    errors = on_two(monkeypatch, lambda comm, rank: None, devices=(1, 1))

    assert {type(each) for each in errors} == {nccl.NcclError}
    assert any("Duplicate GPU" in str(each) for each in errors)


def test_calls_that_differ_are_an_error(monkeypatch):
    together = Together()

    def work(comm, rank):
        source = ready([1, 2, 3])
        together.queue_sum(comm, source, source, count=3 - rank)
        return source.get()

    errors = on_two(monkeypatch, work)
    # Each says what the other one does, but may be raised in either of the threads.
    said = " ".join(map(str, errors))
    sums = "rank 0 sums b'3 float32 0'", "rank 1 sums b'2 float32 0'"
    assert any(each in said for each in sums), said

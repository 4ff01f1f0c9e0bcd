"""Reducer.start with device arrays, which does not wait, and Reducer.free."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hpcaccum import DeviceUnavailableError
from hpcaccum.device import kernels
from hpcaccum.reducer import device as device_exchange

from .on_device import FEW_RANKS, empty_like, to_device
from .reducing import (
    ALL,
    KINDS,
    drawn,
    maker_fixture,  # noqa: F401
    works,
)
from .training import raised

pytestmark = [FEW_RANKS, pytest.mark.any_size]

SHAPES = {"scalar": (), "empty": (0,), "vector": (2330,), "matrix": (15, 117)}


@pytest.fixture
def waits(cp, monkeypatch):
    """Waits for the simulated device, which runs nothing early.

    On a real device they cannot be observed.
    """
    found = []
    if not cp.__version__.endswith("simulated"):
        return found
    monkeypatch.setattr(cp._queues, "progress", 0.0)
    queues = cp._queues
    for where, name in (queues.Queue, "synchronize"), (queues, "synchronize_device"):
        monkeypatch.setattr(where, name, counted(getattr(where, name), found))
    return found


def counted(function, calls):
    def wait(*args, **options):
        calls.append(function)
        return function(*args, **options)

    return wait


def contributions(size, call):
    return [drawn(SHAPES, rank, call, dtype=np.float32) for rank in range(size)]


def check(maker, found, parts):
    for name, array in found.items():
        expected = maker.expected([part[name] for part in parts], np.float32)
        maker.check(array.get() if hasattr(array, "get") else array, expected)


@pytest.mark.parametrize(
    ("maker", "pinned_from"),
    [*zip(KINDS, [0, 1 << 20, 0, 0, 0, 1 << 20], strict=True)],
    indirect=["maker"],
)
def test_start_does_not_wait_for_the_device(
    cp, waits, maker, rank, size, monkeypatch, pinned_from
):
    monkeypatch.setattr(device_exchange, "_PIN", pinned_from)
    reducer, outs = maker(SHAPES), []
    for call in range(6):
        mine = contributions(size, call)[rank]
        outs.append(empty_like(cp, SHAPES, np.float32))
        with cp.cuda.Stream(non_blocking=True):
            # Results of the call before may still be on their way to the device.
            mine = mine if call % 3 == 1 else to_device(cp, mine)
            for name in sorted(mine, reverse=call % 2):
                so_far = len(waits)
                reducer.start(name, mine[name])
                assert len(waits) == so_far
        reducer.wait(out=outs[-1])
    for call, out in enumerate(outs):
        check(maker, out, contributions(size, call))


@ALL
@pytest.mark.parametrize("what", ["deleted", "written"])
def test_what_was_started_may_be_deleted_or_written(cp, waits, maker, rank, size, what):
    reducer = maker(SHAPES)
    for call in range(2):
        parts = contributions(size, call)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        cp.cuda.Device().synchronize()
        others, computing = [], cp.cuda.get_current_stream()
        for name in SHAPES:
            if what == "deleted":
                with cp.cuda.Stream(non_blocking=True):
                    reducer.start(name, mine.pop(name))
                others.append(cp.full(SHAPES[name], 99, np.float32))
            else:
                reducer.start(name, mine[name])
                mine[name].fill(99)
        computing.synchronize()
        reducer.wait(out=out)
        check(maker, out, parts)


@pytest.mark.parametrize("maker", ["shared", "flat", "hierarchical"], indirect=True)
def test_buckets_are_offered_when_they_are_copied(
    cp, waits, maker, rank, size, monkeypatch
):
    reducer, parts, offered = maker(SHAPES), contributions(size, 0), []
    mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
    offer = reducer._schedule.offer
    with monkeypatch.context() as patch:
        patch.setattr(
            reducer._schedule, "offer", lambda n: (offered.append(n), offer(n))
        )
        reducer.start("matrix", mine["matrix"])
        assert not offered or not cp.__version__.endswith("simulated")
        cp.cuda.Device().synchronize()
        reducer.start("vector", mine["vector"])
        # Those of the last array are the first buckets.
        assert offered[0] >= 6
    reducer.start("scalar", parts[rank]["scalar"])
    reducer.start("empty")
    reducer.wait(out=out)
    check(maker, out, parts)


@ALL
def test_the_other_arrays_may_be_passed_to_the_call(cp, waits, maker, rank, size):
    reducer = maker(SHAPES)
    for call in range(3):
        parts = contributions(size, call)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        rest = mine if call else parts[rank]
        reducer.start("vector", mine.pop("vector"))
        reducer.reduce({n: rest[n] for n in mine}, out=out)
        check(maker, out, parts)


@ALL
def test_what_was_started_does_not_outlive_a_failure(cp, waits, maker, rank, size):
    reducer = maker({"x": (900,), "y": (300,)})
    bad = {name: cp.full((n,), np.nan, np.float32) for name, n in [("x", 900)]}
    reducer.start("x", bad["x"])
    error = raised(reducer.fail, ValueError("rank says no"))

    assert "rank says no" in str(error)
    works(reducer, size)


@ALL
def test_a_device_that_fails_in_start_is_an_error_on_this_rank(
    cp, maker, rank, size, monkeypatch
):
    def fails(name):
        raise DeviceUnavailableError("no compiler")

    reducer = maker({"x": (900,), "y": (300,)})
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "kernel", fails)
        error = raised(reducer.start, "x", cp.ones((900,), np.float32))

    assert type(error) is DeviceUnavailableError
    works(reducer, size)


@ALL
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_free_releases_the_memory_of_the_device(cp, pinned, maker, rank, dtype):
    mine, pool = empty_like(cp, SHAPES, dtype), cp.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    reducer = maker(SHAPES, dtype)
    for step in range(2):
        with cp.cuda.Stream(non_blocking=True):
            reducer.reduce(mine, out=mine, step=step)
            reducer.start("vector", mine["vector"])
            reducer.wait(out={"vector": mine["vector"]}, step=step)
    reducer.start("vector", mine["vector"])
    reducer.free()

    assert pool.used_bytes() == before
    assert not pinned


@ALL
def test_free_waits_for_results(cp, waits, maker, rank, size):
    reducer, parts = maker(SHAPES), contributions(size, 1)
    first = empty_like(cp, SHAPES, np.float32)
    # Memory of the device is allocated on the first call's stream.
    reducer.reduce(first, out=first)
    with cp.cuda.Stream(non_blocking=True):
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        reducer.reduce(mine, out=out, step=1)
    reducer.free()
    others = [cp.full(9000, 99, np.float32) for _ in range(3)]
    cp.cuda.get_current_stream().synchronize()

    check(maker, out, parts)
    del others

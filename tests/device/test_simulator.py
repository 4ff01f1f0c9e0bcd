"""The simulated CuPy is as late as a device may be."""

from __future__ import annotations

import cupy
import cupyx
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def latest(monkeypatch):
    """Nothing runs before a wait, and nothing is left for the next test."""
    with monkeypatch.context() as patch:
        patch.setattr(cupy._queues, "progress", 0.0)
        yield
    cupy.cuda.Stream.null.use()
    cupy._queues.synchronize_device()


def ready(values, dtype="float32"):
    """Return an array of the device with values that all streams see."""
    array = cupy.asarray(np.asarray(values, dtype))
    cupy.cuda.Device().synchronize()
    return array


def seen(array):
    """Return what lies in an array's memory now; nothing is waited for."""
    return array._host.copy()


def poisoned(array):
    return set(seen(array).tobytes()) == {0xFF}


@pytest.mark.parametrize(
    ("kind", "expected"), [("pinned", 9), ("registered", 9), ("", 1)]
)
@pytest.mark.parametrize("send", ["set", "asarray"])
def test_pinned_memory_is_read_late_and_other_memory_at_once(kind, expected, send):
    make = cupyx.empty_pinned if kind == "pinned" else np.empty
    host = make(2, "float32")
    host[:] = 1
    if kind == "registered":
        cupy.cuda.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    if send == "set":
        x = cupy.empty(2, "float32")
        x.set(host)
    else:
        x = cupy.asarray(host)
    host[:] = 9
    cupy.cuda.Device().synchronize()

    assert seen(x).tolist() == [expected] * 2
    if kind == "registered":
        cupy.cuda.runtime.hostUnregister(host.ctypes.data)


def stream(kind):
    if kind == "null":
        return cupy.cuda.Stream.null
    return cupy.cuda.Stream(non_blocking=kind == "free")


@pytest.mark.parametrize(
    ("before", "after", "waits", "ordered"),
    [
        ("free", "free", True, True),
        ("free", "free", False, False),
        ("null", "blocking", False, True),
        ("blocking", "null", False, True),
        ("null", "free", False, False),
        ("free", "null", False, False),
        ("blocking", "blocking", False, False),
    ],
)
def test_a_missing_wait_between_streams_is_seen(before, after, waits, ordered):
    first, second = stream(before), stream(after)
    x = ready([1])
    with first:
        x += 1
        event = first.record()
    if waits:
        second.wait_event(event)
    with second:
        y = x * 10
    second.synchronize()

    assert seen(y).tolist() == [20 if ordered else 10]


def test_new_and_freed_memory_is_poisoned():
    x = ready(np.arange(100))
    address = x.data.ptr
    y = x + 1
    del x
    z = cupy.empty(100, "float32")

    assert z.data.ptr == address
    assert poisoned(cupy.empty(100, "float32"))
    assert y.get().tolist() == [*range(1, 101)]
    assert np.isnan(z.get()).all()

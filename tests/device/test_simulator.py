"""The simulated CuPy is as late as a device may be."""

from __future__ import annotations

import cupy
import cupyx
import numpy as np
import pytest

SCALE = r"""
extern "C" __global__ void scale(float* x, const float factor, const long long n)
{
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] *= factor;
    }
}
"""


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


def scale(x):
    kernel = cupy.RawModule(code=SCALE).get_function("scale")
    kernel((1,), (32,), (x, np.float32(2), np.int64(4)))


NEW = {
    "ufunc": lambda x: np.add(x, x),
    "operator": lambda x: x * 2,
    "sum": lambda x: x.sum(),
    "astype": lambda x: x.astype("float64"),
    "chosen": lambda x: x[cupy.asarray([1, 2])],
    "asarray": lambda x: cupy.asarray(np.ones(4)),
}


@pytest.mark.parametrize("name", NEW)
def test_work_only_queues(name):
    result = NEW[name](ready([1, 2, 3, 4]))
    before = poisoned(result)
    cupy.cuda.get_current_stream().synchronize()

    assert before
    assert not poisoned(result)


CHANGES = {
    "in place": lambda x: x.__iadd__(1),
    "fill": lambda x: x.fill(3),
    "slice": lambda x: x.__setitem__(slice(1, 2), 7),
    "scatter": lambda x: cupy.add.at(x, cupy.asarray([0, 0]), 1),
    "copyto": lambda x: cupy.copyto(x, x + 1),
    "set": lambda x: x.set(np.full(4, 9, "float32")),
    "kernel": scale,
}
WAITS = {
    "stream": lambda x, event: cupy.cuda.Stream.null.synchronize(),
    "event": lambda x, event: event.synchronize(),
    "device": lambda x, event: cupy.cuda.Device().synchronize(),
    "get": lambda x, event: x.get(),
    "float": lambda x, event: float(x[0]),
}


@pytest.mark.parametrize(
    ("change", "wait"),
    [*((name, "device") for name in CHANGES), *(("in place", name) for name in WAITS)],
)
def test_who_waits_sees_a_change(change, wait):
    x = ready([1, 2, 3, 4])
    CHANGES[change](x)
    before = seen(x)
    WAITS[wait](x, cupy.cuda.get_current_stream().record())

    assert before.tolist() == [1, 2, 3, 4]
    assert seen(x).tolist() != [1, 2, 3, 4]


def test_pinned_memory_is_old_until_the_event():
    host, stream = cupyx.zeros_pinned(3, "float32"), cupy.cuda.Stream()
    ready([1, 2, 3]).get(stream=stream, out=host, blocking=False)
    event = stream.record()
    before = host.copy()
    event.synchronize()

    assert before.tolist() == [0, 0, 0]
    assert host.tolist() == [1, 2, 3]


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


def test_another_stream_that_still_reads_freed_memory_is_punished():
    other = cupy.cuda.Stream(non_blocking=True)
    x, host = ready([1, 2]), cupyx.zeros_pinned(2, "float32")
    x.get(stream=other, out=host, blocking=False)
    del x
    cupy.cuda.Stream.null.synchronize()
    other.synchronize()

    assert np.isnan(host).all()

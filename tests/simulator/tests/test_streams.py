"""The simulated CuPy is as late as a device may be."""

from __future__ import annotations

import cupy
import cupyx
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    not cupy.__version__.endswith("simulated"),
    reason="of the simulator, not of a device",
)
RuntimeFailure = cupy.cuda.runtime.CUDARuntimeError
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
    monkeypatch.setattr(cupy._queues, "progress", 0.0)
    yield
    monkeypatch.undo()
    cupy.cuda.Device(0).use()
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
    return bool(np.all(np.frombuffer(seen(array).tobytes(), np.uint8) == 0xFF))


def kernel(source=SCALE, name="scale"):
    return cupy.RawModule(code=source).get_function(name)


def streams(*kinds):
    made = {
        "null": lambda: cupy.cuda.Stream.null,
        "blocking": cupy.cuda.Stream,
        "free": lambda: cupy.cuda.Stream(non_blocking=True),
    }
    return [made[kind]() for kind in kinds]


LATE = {
    "ufunc": lambda x: np.add(x, x),
    "out": lambda x: np.add(x, x, out=cupy.empty(4, "float32")),
    "operator": lambda x: x * 2,
    "sum": lambda x: x.sum(),
    "astype": lambda x: x.astype("float64"),
    "copy": lambda x: x.copy(),
    "chosen": lambda x: x[cupy.asarray([1, 2])],
    "asarray": lambda x: cupy.asarray(np.ones(4)),
    "full": lambda x: cupy.full(4, 2.0),
}


@pytest.mark.parametrize("name", LATE)
def test_work_only_queues(name):
    x = ready([1, 2, 3, 4])

    result = LATE[name](x)
    before = poisoned(result)
    cupy.cuda.get_current_stream().synchronize()

    assert before
    assert not poisoned(result)


CHANGES = {
    "in place": lambda x: x.__iadd__(1),
    "fill": lambda x: x.fill(3),
    "slice": lambda x: x.__setitem__(slice(1, 2), 7),
    "rows": lambda x: x.__setitem__(cupy.asarray([0]), 7),
    "scatter": lambda x: cupy.add.at(x, cupy.asarray([0, 0]), 1),
    "copyto": lambda x: cupy.copyto(x, x + 1),
    "set": lambda x: x.set(np.full(4, 9, "float32")),
    "kernel": lambda x: kernel()((1,), (32,), (x, np.float32(2), np.int64(4))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_only_queue(name):
    x = ready([1, 2, 3, 4])

    CHANGES[name](x)
    before = seen(x)
    cupy.cuda.Device().synchronize()

    np.testing.assert_array_equal(before, [1, 2, 3, 4])
    assert seen(x).tolist() != [1, 2, 3, 4]


WAITS = {
    "stream": lambda x, event: cupy.cuda.Stream.null.synchronize(),
    "event": lambda x, event: event.synchronize(),
    "device": lambda x, event: cupy.cuda.Device().synchronize(),
    "get": lambda x, event: x.get(),
    "item": lambda x, event: x[0].item(),
    "float": lambda x, event: float(x[0]),
    "bool": lambda x, event: bool(x[0]),
    "deviceSynchronize": lambda x, event: cupy.cuda.runtime.deviceSynchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_who_waits_sees_it(name):
    x = ready([1, 2])
    x += 1

    WAITS[name](x, cupy.cuda.get_current_stream().record())

    np.testing.assert_array_equal(seen(x), [2, 3])


# Host memory.


def test_pinned_memory_is_old_until_the_event():
    host, stream = cupyx.zeros_pinned(3, "float32"), cupy.cuda.Stream()
    x = ready([1, 2, 3])

    x.get(stream=stream, out=host, blocking=False)
    event = stream.record()
    before = host.copy()
    event.synchronize()

    np.testing.assert_array_equal(before, [0, 0, 0])
    np.testing.assert_array_equal(host, [1, 2, 3])


def registered(values):
    host = np.asarray(values, "float32")
    cupy.cuda.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    return host


def pinned(values):
    host = cupyx.empty_pinned(len(values), "float32")
    host[:] = values
    return host


@pytest.mark.parametrize(
    ("make", "expected"),
    [(pinned, 9), (registered, 9), (lambda v: np.asarray(v, "float32"), 1)],
)
@pytest.mark.parametrize("send", ["set", "asarray"])
def test_pinned_memory_is_read_late_and_other_memory_at_once(make, expected, send):
    host = make([1, 1])

    if send == "set":
        x = cupy.empty(2, "float32")
        x.set(host)
    else:
        x = cupy.asarray(host)
    host[:] = 9
    cupy.cuda.Device().synchronize()

    np.testing.assert_array_equal(seen(x), [expected] * 2)
    if make is registered:
        cupy.cuda.runtime.hostUnregister(host.ctypes.data)


# The order between streams.


@pytest.mark.parametrize(("waits", "expected"), [(True, [3, 6]), (False, [1, 2])])
def test_a_missing_wait_between_streams_is_seen(waits, expected):
    first, second = streams("free", "free")
    x, y = ready([1, 2]), ready([0, 0])

    with first:
        x *= 3
        event = first.record()
    if waits:
        second.wait_event(event)
    with second:
        y += x
    second.synchronize()

    np.testing.assert_array_equal(seen(y), expected)


@pytest.mark.parametrize(
    ("before", "after", "ordered"),
    [
        ("null", "blocking", True),
        ("blocking", "null", True),
        ("null", "free", False),
        ("free", "null", False),
        ("blocking", "blocking", False),
    ],
)
def test_null_stream_waits_and_is_waited_for(before, after, ordered):
    first, second = streams(before, after)
    x = ready([1])

    with first:
        x += 1
    with second:
        y = x * 10
    second.synchronize()

    np.testing.assert_array_equal(seen(y), [20 if ordered else 10])


# Memory.


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])
def test_new_memory_is_poisoned(dtype):
    x = cupy.empty(3, dtype).get()

    assert np.isnan(x).all() if x.dtype.kind == "f" else (x == -1).all()


def test_freed_memory_is_the_next_array_of_the_stream():
    x = ready(np.arange(100))
    address = x.data.ptr
    y = x + 1
    del x

    z = cupy.empty(100, "float32")

    assert z.data.ptr == address
    assert poisoned(cupy.empty(100, "float32"))
    np.testing.assert_array_equal(y.get(), np.arange(1, 101))
    assert np.isnan(z.get()).all()


def test_another_stream_that_still_reads_freed_memory_is_punished():
    other = cupy.cuda.Stream(non_blocking=True)
    x, host = ready([1, 2]), cupyx.zeros_pinned(2, "float32")

    x.get(stream=other, out=host, blocking=False)
    del x
    cupy.cuda.Stream.null.synchronize()
    other.synchronize()

    assert np.isnan(host).all()

"""Kernels, MPI and several devices with the simulated CuPy."""

from __future__ import annotations

import cupy
import cupyx
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from .simulated import (
    ONLY_SIMULATED,
    SCALE,
    RuntimeFailure,
    kernel,
    latest,  # noqa: F401
    ready,
    seen,
)

pytestmark = ONLY_SIMULATED

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")


def test_kernel_scales():
    x = ready(np.arange(1000))

    kernel()((4,), (256,), (x, np.float32(0.5), np.int64(1000)))

    np.testing.assert_array_equal(x.get(), np.arange(1000) / 2)


def test_kernel_that_fails_raises_at_the_next_wait():
    x = ready([1, 2])

    kernel()((1,), (32,), (x, 2.0, np.int64(2)))

    with pytest.raises(RuntimeFailure, match=r"factor.*float64.*test_kernels\.py:"):
        cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(x.get(), [1, 2])


def test_kernel_takes_no_host_array():
    x = ready([1, 2])

    with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy.ndarray'>"):
        kernel()((1,), (32,), (x, np.ones(1, "float32"), np.int64(2)))


def test_kernel_on_a_stream_waits_for_that_stream_only():
    stream, x = cupy.cuda.Stream(non_blocking=True), ready([1, 2])

    kernel()((1,), (32,), (x, np.float32(2), np.int64(2)), stream=stream)
    cupy.cuda.Stream.null.synchronize()
    before = seen(x)
    stream.synchronize()

    np.testing.assert_array_equal(before, [1, 2])
    np.testing.assert_array_equal(seen(x), [2, 4])


def test_too_large_launches_are_refused():
    for grid, block in [((1, 65536), (1,)), ((1,), (2048,)), ((1,), (32, 64))]:
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_VALUE"):
            kernel()(grid, block, ())


def test_source_that_does_not_compile_shows_the_compiler_text():
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nonsense"):
        kernel(SCALE.replace("x[i] *=", "nonsense *="))


def test_unknown_kernel_is_not_found():
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="NOT_FOUND"):
        kernel(name="scales")


def test_old_architecture_does_not_compile(monkeypatch):
    monkeypatch.setenv("CUPY_SIMULATOR_ARCH", "61")

    with pytest.raises(cupy.cuda.compiler.CompileException, match="gpu-architecture"):
        kernel()


# For MPI.


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", BFLOAT16], ids=str)
def test_mpi_takes_device_arrays_and_does_not_wait(dtype):
    x, out = ready([1, 2, 3], dtype), ready([0, 0, 0], dtype)
    kinds = [MPI.BYTE, MPI.BYTE] if dtype == BFLOAT16 else [None, None]
    x += 1

    def copy():
        MPI.COMM_SELF.Sendrecv([x, kinds[0]], 0, recvbuf=[out, kinds[1]], source=0)
        return seen(out).astype("float64")

    too_early = copy()
    cupy.cuda.get_current_stream().synchronize()

    np.testing.assert_array_equal(too_early, [1, 2, 3])
    np.testing.assert_array_equal(copy(), [2, 3, 4])


def test_dlpack_and_array_interface_name_the_device():
    x = ready([1, 2])

    assert x.__dlpack_device__() == (2, 0)
    interface = x.__cuda_array_interface__
    assert interface["data"] == (x.data.ptr, False)
    assert (interface["version"], interface["stream"]) == (3, 1)
    with pytest.raises((BufferError, RuntimeError, TypeError)):
        np.from_dlpack(x)


def test_capsule_keeps_the_memory():
    x = ready([1, 2])
    used = cupy.get_default_memory_pool().used_bytes()

    capsule = x.__dlpack__(stream=-1)
    del x

    assert cupy.get_default_memory_pool().used_bytes() == used
    del capsule
    assert cupy.get_default_memory_pool().used_bytes() == used - 8


def test_from_dlpack_shares_the_memory_and_keeps_it():
    x = ready([[1, 2, 3], [4, 5, 6]])
    used = cupy.get_default_memory_pool().used_bytes()

    y = cupy.from_dlpack(x)[:, 1]
    x += 1
    del x

    np.testing.assert_array_equal(y.get(), [3, 6])
    assert cupy.get_default_memory_pool().used_bytes() == used
    with pytest.raises(ValueError, match="Unsupported"):
        cupy.from_dlpack(np.ones(3))


# Devices.


def test_devices_do_not_mix(two_devices):
    here = ready([1, 2])
    with cupy.cuda.Device(1):
        there = ready([1, 2])

    assert (here.device.id, there.device.id) == (0, 1)
    for call in (
        lambda: here + there,
        lambda: there * 2,
        lambda: np.add(here, 1, out=there),
        lambda: here.__setitem__(..., there),
        lambda: there.fill(0),
    ):
        with pytest.raises(ValueError, match="must be same as the current device"):
            call()
    np.testing.assert_array_equal(there.get(), [1, 2])


def test_kernel_cannot_reach_another_device(two_devices):
    with cupy.cuda.Device(1):
        there = ready([1, 2])

    kernel()((1,), (32,), (there, np.float32(2), np.int64(2)))

    with pytest.raises(RuntimeFailure, match="IllegalAddress"):
        cupy.cuda.Device().synchronize()


def test_streams_belong_to_devices(two_devices):
    stream = cupy.cuda.Stream()

    with cupy.cuda.Device(1):
        with pytest.raises(RuntimeError, match="not created on device 1"):
            stream.use()
        x = ready([1, 2])
        with pytest.raises(RuntimeFailure, match="InvalidResourceHandle"):
            x.set(np.ones(2, "float32"), stream=stream)


def test_each_device_has_a_null_stream(two_devices):
    x = ready([1])
    x += 1

    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        cupy.cuda.Stream.null.synchronize()
    assert seen(x).tolist() == [1]

    cupy.cuda.Device(0).synchronize()
    assert seen(x).tolist() == [2]


def test_device_says_what_it_is(two_devices):
    assert cupy.cuda.runtime.getDeviceCount() == 2
    assert cupy.is_available()
    assert cupy.cuda.Device().attributes["MultiProcessorCount"] == 2
    assert cupy.cuda.Device(1).compute_capability == "90"
    assert cupy.cuda.Device().mem_info[0] > 0
    with pytest.raises(RuntimeFailure, match="InvalidDevice"):
        cupy.cuda.Device(2).use()


NO_DRIVER = {
    "count": lambda: cupy.cuda.runtime.getDeviceCount(),
    "zeros": lambda: cupy.zeros(3),
    "asarray": lambda: cupy.asarray(np.ones(3)),
    "stream": lambda: cupy.cuda.Stream(),
    "device": lambda: cupy.cuda.Device(),
    "pinned": lambda: cupyx.empty_pinned(3),
    "register": lambda: cupy.cuda.runtime.hostRegister(8, 8, 0),
    "current": lambda: cupy.cuda.get_current_stream(),
}


@pytest.mark.parametrize("name", NO_DRIVER)
def test_without_a_driver(name, monkeypatch):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "0")

    assert not cupy.is_available()
    assert not cupy.cuda.is_available()
    with pytest.raises(RuntimeFailure, match="CUDA driver version is insufficient"):
        NO_DRIVER[name]()

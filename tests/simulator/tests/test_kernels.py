"""Kernels, MPI and several devices with the simulated CuPy."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from .simulated import (
    ONLY_SIMULATED,
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

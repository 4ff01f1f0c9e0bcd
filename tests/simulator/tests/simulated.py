"""What the tests of the simulated CuPy share."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

ONLY_SIMULATED = pytest.mark.skipif(
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

"""Copies between arrays of the device and of the host, of any kind."""

import itertools
import re
import sys

import numpy as np
import pytest

from hpcaccum import DeviceUnavailableError
from hpcaccum.device import arrays as device

from .training import raised

pytestmark = pytest.mark.any_size

KINDS = {
    "plain": lambda array: array,
    "number": lambda array: array[1:, 2].reshape(()),
    "strided": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
}


@pytest.mark.parametrize(
    "dtypes", [*itertools.product(["float16", "float64"], repeat=2)]
)
@pytest.mark.parametrize("places", [*itertools.product(["here", "there"], repeat=2)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied(cp, dtypes, places, kind):
    numbers = np.arange(6.0).reshape(2, 3)
    source = KINDS[kind](numbers.astype(dtypes[0]))
    target = KINDS[kind](np.full((2, 3), -7, dtypes[1]))
    source, target = (
        array if place == "here" else cp.asarray(array)
        for place, array in zip(places, (source, target), strict=True)
    )
    device.copyto(target, source)

    assert target.dtype == dtypes[1]
    np.testing.assert_array_equal(device.to_host(target), KINDS[kind](numbers))


def test_pinned_memory_may_be_changed_at_once(cp):
    import cupyx

    source = cupyx.empty_pinned((500,), np.float32)
    target = cp.zeros((500,), np.float32)
    for number in range(5):
        source[:] = number
        device.copyto(target, source)
        source[:] = -7
        assert (target.get() == number).all()


COPIES = {
    "to_host": lambda here, there: device.to_host(there),
    "to the host": lambda here, there: device.copyto(here, there),
    "to the device": lambda here, there: device.copyto(there, here),
    "on the device": lambda here, there: device.copyto(there, there + 1),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_stream_that_was_used_is_kept(cp, copy):
    """A program may queue more work on it, and delete it before that is complete."""
    here = np.zeros(3, np.float32)
    with cp.cuda.Stream(non_blocking=True) as stream:
        COPIES[copy](here, cp.ones(3, np.float32))
    address = stream.ptr
    del stream

    assert cp.cuda.Stream(non_blocking=True).ptr != address


def test_arrays_of_another_device(cp, monkeypatch):
    array = cp.ones(3, np.float32)
    if cp.cuda.runtime.getDeviceCount() > 1:
        with cp.cuda.Device(1 - array.device.id):
            error = raised(device.check_array, "x", array, [np.float32])
    else:
        monkeypatch.setattr("hpcaccum.device.arrays.current_device", lambda: 1)
        error = raised(device.check_array, "x", array, [np.float32])

    assert "x is on device 0, the current one is 1" in str(error)


def test_ranks_take_one_device_after_the_other(cp):
    count = cp.cuda.runtime.getDeviceCount()
    before = cp.cuda.Device().id
    assert [device.use_device(rank) for rank in range(2 * count)] == [*range(count)] * 2
    cp.cuda.Device(before).use()
    assert "CUDA" in device.device_name()


@pytest.fixture
def forgotten():
    device.cupy.cache_clear()
    yield
    device.cupy.cache_clear()


def without_driver(cp):
    raise cp.cuda.runtime.CUDARuntimeError(35)


INSTALL = "pip install 'cupy-cuda13x>=14'"
# What there is instead of a CuPy that can be used, and the error.
UNFIT = {
    "none": INSTALL,
    "13.6.0": f"CuPy 13.6.0 is too old, hpcaccum needs 14 or newer.*{INSTALL}",
    "9.0.0rc1": "CuPy 9.0.0rc1 is too old",
    "no driver": "finds no CUDA device: cudaErrorInsufficientDriver",
    "no device": "there is no CUDA device on this machine",
}


@pytest.mark.parametrize("case", UNFIT)
def test_without_a_cupy_that_can_be_used(cp, forgotten, monkeypatch, case):
    devices = {"no driver": lambda: without_driver(cp), "no device": lambda: 0}
    if case == "none":
        monkeypatch.setitem(sys.modules, "cupy", None)
    elif case in devices:
        monkeypatch.setattr(cp.cuda.runtime, "getDeviceCount", devices[case])
    else:
        monkeypatch.setattr(cp, "__version__", case)
    error = raised(device.cupy)

    assert type(error) is DeviceUnavailableError
    assert re.search(UNFIT[case], str(error), re.DOTALL)
    assert case != "none" or not device.is_device(object())


def test_memory_that_cannot_be_pinned_is_no_error(cp, monkeypatch, caplog):
    def fails(*args):
        raise cp.cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(cp.cuda.runtime, "hostRegister", fails)
    monkeypatch.setattr(cp.cuda.runtime, "hostUnregister", fails)
    memory = np.zeros(1 << 20, np.uint8)
    device.Pinned(memory).free()

    assert "1.0 MiB of host memory cannot be pinned" in caplog.text

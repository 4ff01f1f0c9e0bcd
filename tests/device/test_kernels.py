"""How kernels are found; errors when they cannot be compiled."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from hpcaccum import DeviceUnavailableError
from hpcaccum.device import kernels

from .launching import forget_kernels

# What CuPy 14.2 says, with NVRTC 13.0; each is raised where it was seen.
TEXTS = {
    "no NVRTC": (
        RuntimeError(
            'Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file'
        ),
        "NVRTC, with which CuPy compiles, cannot be loaded",
    ),
    "no headers": (
        cupy.cuda.compiler.CompileException(
            'catastrophic error: cannot open source file "cuda_bf16.h"', "", "", ()
        ),
        "CUDA's headers are missing",
    ),
    "an old device": (
        cupy.cuda.compiler.CompileException(
            "nvrtc: error: invalid value for --gpu-architecture (-arch)\n", "", "", ()
        ),
        "the installed NVRTC does not support this device's architecture",
    ),
    "a fault of ours": (
        cupy.cuda.compiler.CompileException("error: expected a ';'\n", "", "", ()),
        "accumulate.cu of hpcaccum does not compile: error: expected a ';'",
    ),
}


@pytest.fixture
def forgotten():
    """All that was compiled, and all that was found wrong, is forgotten."""
    forget_kernels()
    yield
    forget_kernels()


@pytest.mark.parametrize("case", TEXTS)
def test_what_is_missing_is_named(case, forgotten, monkeypatch):
    error, message = TEXTS[case]

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(cupy, "RawModule", fails)
    with pytest.raises(DeviceUnavailableError) as raised:
        kernels.kernel("accumulate_f32")

    assert message in str(raised.value)
    assert raised.value.__cause__ is error


def test_other_errors_are_what_they_are(forgotten, monkeypatch):
    def fails(*args, **kwargs):
        raise MemoryError("no memory")

    monkeypatch.setattr(cupy, "RawModule", fails)
    with pytest.raises(MemoryError):
        kernels.kernel("accumulate_f32")


def test_a_kernel_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError, match="no kernel accumulate_i32 in accumulate"):
        kernels.kernel("accumulate_i32")


def test_sources_hold_all_they_include():
    for file in kernels.files():
        text = kernels.source(file)
        assert '#include "' not in text
        assert '#line 1 "common.cuh"' in text
        assert f'"{file}"\n' in text


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 10**12])
def test_as_many_blocks_as_there_is_work_for(size):
    full = 4 * cupy.cuda.Device().attributes["MultiProcessorCount"]

    assert kernels.blocks(size) == min(full, max(1, -(-size // 1024)))


def test_a_python_number_is_not_a_float32():
    kernel, table = kernels.kernel("sgd_f32"), cupy.zeros(4, np.int64)
    kernel((1,), (256,), (table, table, table, np.int64(4), None, 0.5))
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="float64"):
        cupy.cuda.Device().synchronize()

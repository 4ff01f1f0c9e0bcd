"""How kernels are found; errors when they cannot be compiled."""

from __future__ import annotations

import cupy
import pytest
from cpu_cuda.compiler import entry_points

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


def test_the_table_has_every_kernel_of_every_file():
    defined = {
        name: path.name
        for path in kernels.shipped("kernels").glob("*.cu")
        for name in entry_points(kernels.source(path.name))
    }

    assert defined == kernels.FILES
    assert kernels.files() == sorted(set(defined.values()))

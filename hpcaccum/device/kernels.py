"""The package's CUDA kernels: their sources, their compilation, their launch.

NVRTC compiles a file, through CuPy, when one of its kernels is first used; CuPy caches
the result on disk. Scalar arguments must be NumPy scalars: CuPy passes a Python float
as a double whatever the kernel declares.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcaccum.device.arrays import cupy, current_device
from hpcaccum.dtypes import BFLOAT16
from hpcaccum.errors import DeviceUnavailableError
from hpcaccum.files import shipped

# Threads of a block, for which the kernels are compiled (kernels/common.cuh).
THREADS = 256
# Blocks that a multiprocessor runs at once. A streaming kernel starts no more: all its
# blocks then run from its beginning to its end.
_BLOCKS = 4
# Elements that a thread moves at once; smaller blocks of work leave threads idle.
_VECTOR = 4

OPTIONS = ("--std=c++17",)

# How the name of a kernel for a dtype ends.
SUFFIXES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
    np.dtype(np.float16): "f16",
    BFLOAT16: "bf16",
}

_ALL, _WIDE = ("f32", "f64", "f16", "bf16"), ("f32", "f64")
_RULES = ("sgd", "momentum", "nesterov", "adagrad", "adam")
_STEMS: dict[str, dict[str, tuple[str, ...]]] = {
    "accumulate.cu": {"accumulate": _ALL},
    "finish.cu": {"mean": _WIDE, "mean_clip": _WIDE, "square_norm": _ALL},
    "multi_tensor.cu": {
        "multi_accumulate": _WIDE,
        "pack": _ALL,
        "unpack": _ALL,
        "largest": ("f64",),
    },
    "sparse.cu": {"scatter_add_rows": _WIDE, "mean_rows": _WIDE},
    "update.cu": dict.fromkeys(_RULES, _ALL),
}
# The file that defines each kernel.
FILES = {
    f"{stem}_{suffix}": file
    for file, stems in _STEMS.items()
    for stem, suffixes in stems.items()
    for suffix in suffixes
}

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)

# Messages of CuPy and NVRTC, and the causes that a user can remove.
_CAUSES = (
    (
        r"could not open source file|cannot open source file|CUDA headers",
        "CUDA's headers are missing: install a CUDA toolkit and set CUDA_PATH, or "
        "pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x for CUDA 12)",
    ),
    (
        r"gpu-architecture|INVALID_OPTION|unsupported architecture|sm_\d+ is not",
        "the installed NVRTC does not support this device's architecture: install a "
        "CuPy for another CUDA version",
    ),
    (
        r"nvrtc.*(load|find|open|import)|(load|find|open|import)\w*.*nvrtc",
        "NVRTC, with which CuPy compiles, cannot be loaded: install a CUDA toolkit, or "
        "pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x for CUDA 12)",
    ),
)


def kernel(name: str) -> Any:
    """Return a kernel of `FILES` for the current device, and CuPy's current stream.

    Call it with ``(grid, block, args)``. If there is no device, or kernels cannot be
    compiled for it, the DeviceUnavailableError names what to install.
    """
    return _kernel(name, current_device())


def of_dtype(stem: str, dtype: np.dtype[Any]) -> Any:
    """Return the kernel whose name is a stem and the suffix of a dtype."""
    return kernel(f"{stem}_{SUFFIXES[dtype]}")


def prepare(
    stem: str, dtype: np.dtype[Any], number: int, *arguments: Any
) -> Callable[[], object]:
    """Prepare the launch of a number of blocks of `of_dtype`; return what queues it."""
    return functools.partial(of_dtype(stem, dtype), (number,), (THREADS,), arguments)


def blocks(size: int) -> int:
    """Return how many blocks to start for ``size`` elements: at least one.

    Kernels loop over their elements with the grid as stride, so any number is correct.
    This is the most that the current device runs at once, but no more than have work.
    """
    full = _BLOCKS * _multiprocessors(current_device())
    return max(1, min(full, -(-size // (THREADS * _VECTOR))))


@functools.cache
def source(file: str) -> str:
    """Return a source, such as ``accumulate.cu``, with its includes expanded.

    CuPy's cache of compiled kernels is keyed by the text of the source alone, so that
    text must contain all that the kernel depends on.
    """
    text = (shipped("kernels") / file).read_text()
    if file.endswith(".cuh"):
        text = text.replace("#pragma once\n", "\n", 1)

    def paste(match: re.Match[str]) -> str:
        line = text[: match.end()].count("\n") + 1
        included = f'#line 1 "{match[1]}"\n{source(match[1])}'
        return f'{included}#line {line} "{file}"\n'

    return _INCLUDE.sub(paste, text)


def files() -> list[str]:
    """Return the names of all sources that define kernels."""
    return sorted(_STEMS)


@functools.cache
def _kernel(name: str, device_id: int) -> Any:
    if name not in FILES:
        raise KeyError(f"no kernel {name} in {', '.join(files())}")
    file = FILES[name]
    try:
        return _module(file, device_id).get_function(name)
    except Exception as error:
        raise _explained(file, error) from error


@functools.cache
def _module(file: str, device_id: int) -> Any:
    return cupy().RawModule(code=source(file), options=OPTIONS)


def _explained(file: str, error: Exception) -> Exception:
    """Return the error to raise for one of compilation; another is returned as is."""
    text, cuda = str(error), cupy().cuda
    for pattern, cause in _CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            return DeviceUnavailableError(f"{cause} ({_shortened(text)})")
    if isinstance(error, cuda.compiler.CompileException):
        return DeviceUnavailableError(
            f"{file} of hpcaccum does not compile: {_shortened(text)}"
        )
    return error


def _shortened(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:2])[:300]


@functools.cache
def _multiprocessors(device_id: int) -> int:
    attributes = cupy().cuda.Device(device_id).attributes
    return int(attributes["MultiProcessorCount"])

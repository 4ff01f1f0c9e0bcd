"""Our CUDA kernels: where their sources are, how they are compiled and started.

A file is compiled when one of its kernels is first used, by NVRTC through CuPy, which
keeps the result on disk. Launching them needs NumPy scalars: CuPy passes a Python float
as a double whatever the kernel declares.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from hpcaccum.device.arrays import cupy
from hpcaccum.dtypes import BFLOAT16
from hpcaccum.errors import DeviceUnavailableError

# Threads of a block, for which the kernels are compiled (kernels/common.cuh).
THREADS = 256
# Blocks that a multiprocessor holds at once: all of a streaming kernel's are at work
# from its beginning to its end, and few take a ticket there.
_BLOCKS = 4
# Elements that a thread moves at once; a block for fewer would have idle threads.
_VECTOR = 4

OPTIONS = ("--std=c++17",)

# What kernels for a dtype are called.
SUFFIXES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float64): "f64",
    np.dtype(np.float16): "f16",
    BFLOAT16: "bf16",
}

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)

# What CuPy or NVRTC says, and what that means to a user.
_CAUSES = (
    (
        r"could not open source file|cannot open source file|CUDA headers",
        "CUDA's headers are missing: install a CUDA toolkit and set CUDA_PATH, or "
        "pip install 'cupy-cuda13x[ctk]', or 12x",
    ),
    (
        r"gpu-architecture|INVALID_OPTION|unsupported architecture|sm_\d+ is not",
        "this device's architecture is not one that the installed NVRTC compiles for: "
        "install a CuPy of another CUDA version",
    ),
    (
        r"nvrtc.*(load|find|open|import)|(load|find|open|import)\w*.*nvrtc",
        "NVRTC, with which CuPy compiles, cannot be loaded: install a CUDA toolkit, or "
        "pip install 'cupy-cuda13x[ctk]', or 12x",
    ),
)


def kernel(name: str) -> Any:
    """Return a kernel for the current device, to be called ``(grid, block, args)``.

    It runs on CuPy's current stream.

    Args:
        name: As in the sources, such as ``accumulate_f32``.

    Raises:
        DeviceUnavailableError: If there is no device, or kernels cannot be compiled for
            it; says what to install.
    """
    return _kernel(name, cupy().cuda.runtime.getDevice())


def blocks(size: int) -> int:
    """Return how many blocks to start for so many elements: at least one.

    Kernels go through their elements with a stride, so any number is right. It is
    the most that the current device runs at once, but no more than have work.
    """
    full = _BLOCKS * _multiprocessors(cupy().cuda.runtime.getDevice())
    return max(1, min(full, -(-size // (THREADS * _VECTOR))))


def streaming(size: int) -> tuple[tuple[int], tuple[int]]:
    """Return grid and block of a kernel that goes through so many elements."""
    return (blocks(size),), (THREADS,)


@functools.cache
def source(file: str) -> str:
    """Return a source, such as ``accumulate.cu``, with its includes pasted in.

    CuPy looks for a compiled kernel by the text of its source alone, so that text must
    have all that the kernel depends on.
    """
    text = (_folder() / file).read_text()
    if file.endswith(".cuh"):
        text = text.replace("#pragma once\n", "\n", 1)

    def paste(match: re.Match[str]) -> str:
        line = text[: match.end()].count("\n") + 1
        included = f'#line 1 "{match[1]}"\n{source(match[1])}'
        return f'{included}#line {line} "{file}"\n'

    return _INCLUDE.sub(paste, text)


def files() -> list[str]:
    """Return the names of all sources that have kernels."""
    return sorted(path.name for path in _folder().glob("*.cu"))


@functools.cache
def _folder() -> Path:
    # Beside the package in a checkout, inside it where it is installed.
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "kernels", here.parent / "kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no CUDA kernels in {here} or beside it; reinstall")


@functools.cache
def _file_of(name: str) -> str:
    """Return the source that has a kernel, by its instantiation or its definition."""
    stem, _, suffix = name.rpartition("_")
    written = re.compile(
        rf"^(KERNEL {name}\(|[A-Z_]+\({name}[,)]|.*\b{stem}_##KIND\()", re.MULTILINE
    )
    for file in files():
        if suffix in SUFFIXES.values() and written.search(source(file)):
            return file
    raise KeyError(f"no kernel {name} in {', '.join(files())}")


@functools.cache
def _kernel(name: str, device_id: int) -> Any:
    """A kernel of a module that CuPy loads for each device."""
    file = _file_of(name)
    try:
        return _module(file, device_id).get_function(name)
    except Exception as error:
        raise _explained(file, error) from error


@functools.cache
def _module(file: str, device_id: int) -> Any:
    return cupy().RawModule(code=source(file), options=OPTIONS)


def _explained(file: str, error: Exception) -> Exception:
    """Return what to raise for an error of compiling: itself if it is another."""
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

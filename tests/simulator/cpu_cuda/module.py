"""A CUDA source that can be launched, and the values that a launch is given."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from . import compiler
from .errors import CudaError

KINDS = {"f": "f", "i": "i", "u": "i", "b": "i"}
WORDS = {"p": "a pointer", "f": "a float", "i": "an integer", "s": "a struct"}


@functools.cache
def build(source: str, options: tuple[str, ...] = ()) -> Module:
    """Compile a CUDA source for the CPU.

    CPU_CUDA_CHECKS of the environment selects a check: "", "undefined", "address" (in a
    process that has libasan preloaded) or "race".

    Args:
        options: As given to CuPy; those that g++ does not know are dropped.

    Raises:
        CudaError: With the compiler's text.
    """
    parameters = compiler.entry_points(source, options)
    if not parameters:
        raise CudaError('the source has no extern "C" __global__ function')
    checks = os.environ.get("CPU_CUDA_CHECKS", "")
    return Module(compiler.library(source, options, checks), parameters)


class Module:
    """The kernels of one source.

    Args:
        path: Of the library.
        parameters: Kernel name to the names of its parameters.
    """

    def __init__(self, path: Path, parameters: dict[str, list[str]]) -> None:
        self.path = path
        self.names = list(parameters)
        self._parameters = parameters
        self._library = ctypes.CDLL(str(path))
        self._launch = self._library.cpu_cuda_launch
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._launch.argtypes = [pointer] * 4 + [ctypes.c_uint64, ctypes.c_char_p, size]

    def launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        """Run a kernel to its end, its threads in random order.

        Args:
            args: NumPy scalars, None, or objects with `ptr` and `nbytes`.

        Raises:
            CudaError: If an argument is of another width than its parameter, or the
                kernel goes wrong.
        """
        if name not in self._parameters:
            raise CudaError(f"no kernel {name}; there are {', '.join(self.names)}")
        sizes = [_three(name, "grid", grid, 2**31 - 1), _three(name, "block", block)]
        if np.prod(sizes[1]) > 1024:
            raise CudaError(f"{name}: {block} are more than 1024 threads a block")
        values = self._values(name, args)
        seed = int(os.environ.get("CPU_CUDA_SEED") or random.getrandbits(32))
        if text := self._run(name, sizes, values, seed):
            raise CudaError(f"{name}: {self._located(text)} (CPU_CUDA_SEED={seed})")

    def _run(self, name: str, sizes: Any, values: list[Any], seed: int) -> str:
        grid, block = ((ctypes.c_uint * 3)(*each) for each in sizes)
        addresses = [each.ctypes.data for each in values]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*addresses)
        message = ctypes.create_string_buffer(1000)
        kernel = getattr(self._library, f"cpu_cuda_call_{name}")
        self._launch(kernel, grid, block, pointers, seed, message, len(message))
        return message.value.decode()

    def _values(self, name: str, args: Any) -> list[Any]:
        names, kinds = self._parameters[name], self._kinds(name)
        if len(args) != len(kinds):
            raise CudaError(
                f"{name} has {len(kinds)} parameters ({', '.join(names)}), "
                f"got {len(args)} arguments"
            )
        return [
            _value(f"{name}: {parameter}", kind, argument)
            for parameter, kind, argument in zip(names, kinds, args, strict=True)
        ]

    def _kinds(self, name: str) -> list[str]:
        function = getattr(self._library, f"cpu_cuda_parameters_{name}")
        text = ctypes.create_string_buffer(1000)
        function(text, ctypes.c_size_t(len(text)))
        return text.value.decode().split()

    def _located(self, text: str) -> str:
        """Replace addresses of code by file and line."""
        for code in set(re.findall(r"code (0x[0-9a-f]+)", text)):
            text = text.replace(f"code {code}", self._line(int(code, 16)))
        return text

    def _line(self, address: int) -> str:
        with Path("/proc/self/maps").open() as maps:
            mapped = [each for each in maps if each.rstrip().endswith(str(self.path))]
        base = int(mapped[0].split("-")[0], 16)
        # Before the address to return to lies the call.
        command = ["addr2line", "-i", "-e", str(self.path), hex(address - base - 1)]
        lines = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [each for each in lines.stdout.split() if ".cu" in each]
        return Path(found[0]).name if found else hex(address)


def _three(name: str, what: str, given: Any, most: int = 1024) -> list[int]:
    sizes = [int(each) for each in given]
    limits = [most, *([65535, 65535] if what == "grid" else [1024, 64])]
    if not 1 <= len(sizes) <= 3 or not all(
        1 <= size <= limit for size, limit in zip(sizes, limits, strict=False)
    ):
        raise CudaError(f"{name}: {what} {given} is not within {limits}")
    return sizes + [1] * (3 - len(sizes))


def _value(where: str, kind: str, argument: Any) -> Any:
    """Return an array of one element: what the parameter's memory holds."""
    wanted = f"{WORDS[kind[0]]} of {kind[1:]} bytes"
    if argument is None or hasattr(argument, "ptr"):
        if kind[0] != "p":
            raise CudaError(f"{where} is {wanted}, got an array")
        return np.array([getattr(argument, "ptr", 0)], np.uint64)
    scalar = np.array([argument])
    if KINDS.get(scalar.dtype.kind) != kind[0] or scalar.itemsize != int(kind[1:]):
        raise CudaError(f"{where} is {wanted}, got {scalar.dtype} {argument!r}")
    return scalar

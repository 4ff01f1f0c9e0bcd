"""Compiles sources as CuPy would on a device of another machine; run as a program.

    python nvrtc.py 90 a.cu b.cu

prints, as JSON, for each file what the compilers said. CuPy itself is asked, so that
the options are its own: all it is not given is a device.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path


class Compiled(Exception):
    """Raised in place of loading the result to a device."""


def main(arch: str, *paths: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # For what is compiled already there would be no message.
        os.environ["CUPY_CACHE_DIR"] = folder
        json.dump(
            {path: compile_as_cupy_does(path, arch) for path in paths}, sys.stdout
        )


def compile_as_cupy_does(path: str, arch: str) -> str:
    from cupy._core import core
    from cupy.cuda import compiler

    class Module:
        def load(self, cubin: bytes) -> None:
            raise Compiled

        def _set_mapping(self, mapping: object) -> None:
            pass

    class Function:
        pass

    Function.Module = Module
    compiler.function = Function
    # It would ask the device.
    compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (
        f"-arch=sm_{arch}",
        "cubin",
    )
    log, options = io.StringIO(), ("--std=c++17", "--ptxas-options=-v")
    try:
        core.compile_with_cache(
            Path(path).read_text(), options, arch, False, log_stream=log
        )
    except Compiled:
        return log.getvalue()
    raise AssertionError("CuPy has compiled nothing")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A CUDA device simulated on the CPU: see README.md.

This module makes it importable for the tests of hpcaccum.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import numpy as np

FOLDER = str(Path(__file__).parent)


def install() -> None:
    """Make ``import cupy`` find the simulated one."""
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)


def skip_reason() -> str:
    """Return why kernels cannot be built for the CPU; empty if they can. Install first.

    Raises:
        RuntimeError: If they cannot, but HPCACCUM_REQUIRE_KERNELS=1.
    """
    if int(np.__version__.partition(".")[0]) < 2:
        return "CuPy needs NumPy 2"
    missing: str = importlib.import_module("cpu_cuda").missing()
    if missing and os.environ.get("HPCACCUM_REQUIRE_KERNELS") == "1":
        raise RuntimeError(f"HPCACCUM_REQUIRE_KERNELS=1, but {missing}")
    return missing and f"kernels cannot be built for the CPU: {missing}"

"""The true CuPy, over a driver that does nothing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from . import install

REQUIRED = os.environ.get("HPCACCUM_REQUIRE_CUPY") == "1"


@pytest.fixture(scope="session", name="driver")
def driver_fixture(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The driver, installed under CuPy."""
    problem = install.missing()
    if problem and not REQUIRED:
        pytest.skip(f"the true CuPy cannot run here: {problem}")
    assert not problem, problem
    folder = tmp_path_factory.mktemp("driver")
    os.environ.setdefault("CUPY_CACHE_DIR", str(folder / "cache"))
    # CUB takes 15 s to compile, for sums that only benchmarks need.
    os.environ.setdefault("CUPY_ACCELERATORS", "")
    driver = install.install(folder)
    driver.null_driver_launches.restype = ctypes.c_long
    return driver


@pytest.fixture(scope="session", name="cp")
def cupy_fixture(driver: ctypes.CDLL) -> Any:
    """CuPy."""
    import cupy

    simulator = Path(__file__).parents[1] / "simulator"
    assert simulator not in Path(cupy.__file__).parents
    return cupy

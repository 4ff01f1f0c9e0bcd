"""Tests of what needs no MPI: they run once, in one process, without mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_mpi() -> Iterator[None]:
    """Fail a test that loads MPI: it belongs in tests/mpi."""
    before = "mpi4py.MPI" in sys.modules
    yield
    assert before or "mpi4py.MPI" not in sys.modules, "this test has loaded MPI"

"""Tests of programs that need the adapters' libraries: they start what they need."""

from __future__ import annotations

from ..system.conftest import mpi_environment, mpiexec, mpirun  # noqa: F401

"""Tests of the adapters run as those of tests/mpi do: all ranks run each of them."""

from __future__ import annotations

import os

import pytest

from .. import simulator
from ..mpi import conftest as ranks
from ..mpi.conftest import (  # noqa: F401
    comm,
    device_library,
    keep_fixture,
    limit,
    own_card,
    pytest_addoption,
    pytest_cmdline_main,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_make_collect_report,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_sessionstart,
    rank,
    size,
)
from ..mpi.on_device import wants_gpu

# Tests of several devices need two; all others use the first.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


@pytest.hookimpl(trylast=True)  # as that of tests/mpi
def pytest_configure(config: pytest.Config) -> None:
    ranks.pytest_configure(config)
    if not wants_gpu(config):
        simulator.install()
        from .device_tensors import register

        register()


@pytest.fixture
def average(comm, keep):  # noqa: F811
    """Return a transformation that is freed after the test."""
    # Not at the top: XLA_FLAGS come first.
    import hpcaccum.jax

    return keep(hpcaccum.jax.average(comm))

"""Tests of the adapters run as those of tests/mpi do: all ranks run each of them."""

from __future__ import annotations

from ..mpi.conftest import (  # noqa: F401
    comm,
    limit,
    pytest_addoption,
    pytest_cmdline_main,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_sessionstart,
    rank,
    size,
)

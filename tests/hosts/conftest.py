"""Tests on several hosts: skipped where none can be made."""

from __future__ import annotations

import os

import pytest

from tests.cluster.hosts import obstacle


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    """Skip these tests unless HPCACCUM_REQUIRE_HOSTS=1."""
    reason = obstacle()
    if reason and os.environ.get("HPCACCUM_REQUIRE_HOSTS") == "1":
        pytest.fail(f"HPCACCUM_REQUIRE_HOSTS=1, but hosts {reason}")
    if reason:
        pytest.skip(f"hosts {reason}")

"""Tests of the simulator itself; hpcaccum is not involved."""

from __future__ import annotations

from pathlib import Path

import pytest

from .. import install, skip_reason

HERE = Path(__file__).parent
collect_ignore_glob: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported.  Nothing of this is for a GPU.
    if config.option.markexpr.strip() == "gpu":
        collect_ignore_glob.append("test_*.py")
    else:
        install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.parent == HERE]
    if own and (reason := skip_reason()):
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))

"""The programs of examples/ run as they are, and do what they say."""

from __future__ import annotations

import re
from pathlib import Path

from ..system.conftest import REPOSITORY

ENV = {"HPCACCUM_TIMEOUT": "60"}


def test_torch_digits(mpirun):
    result = mpirun(3, REPOSITORY / "examples" / "torch_digits.py", env=ENV)

    assert result.returncode == 0, result.stdout
    (share,) = re.findall(r"([\d.]+)% correct", result.stdout)
    assert float(share) > 85


def test_torch_stragglers(mpirun):
    result = mpirun(3, REPOSITORY / "examples" / "torch_stragglers.py", env=ENV)

    assert result.returncode == 0, result.stdout
    rows = re.findall(r"^([\w-]+) +([\d.]+) +(\d+)  (.*)$", result.stdout, re.MULTILINE)
    updates = {name: int(number) for name, _, number, _ in rows}
    assert updates["cross-shard"] == 40
    assert updates["sync-replicas"] >= 60
    assert updates["drop-stale"] >= 120
    assert updates["agn"] >= 12


def test_jax_digits(mpirun):
    result = mpirun(3, REPOSITORY / "examples" / "jax_digits.py", env=ENV)

    assert result.returncode == 0, result.stdout
    (share,) = re.findall(r"^test accuracy ([\d.]+)%$", result.stdout, re.MULTILINE)
    assert float(share) > 85


def test_every_example_is_tested():
    text = Path(__file__).read_text()

    assert all(p.name in text for p in (REPOSITORY / "examples").glob("*.py"))

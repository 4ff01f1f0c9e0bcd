"""What `make` passes on to pytest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", "tests/unit"),
        ("-k name", "tests/unit -k name"),
        # An option that contains a path selects no tests.
        ("--ignore=tests/unit/a.py", "tests/unit --ignore=tests/unit/a.py"),
        ("tests/unit/a.py -x", "tests/unit/a.py -x"),
    ],
)
def test_paths_among_the_arguments_replace_the_directory(args, expected):
    outside = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", "test-unit", f"ARGS={args}"],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pytest_line = done.stdout.splitlines()[-1]
    assert pytest_line.split("pytest", 1)[1].split("</dev/null")[0].split() == (
        expected.split()
    )

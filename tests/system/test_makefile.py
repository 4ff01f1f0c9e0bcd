"""What `make` passes on to pytest, and the legs of .ci/run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dry_run(*arguments):
    """Return the commands that make would run."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFL"))}
    done = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    pytest_line = dry_run("test-unit", f"ARGS={args}").splitlines()[-1]
    assert pytest_line.split("pytest", 1)[1].split("</dev/null")[0].split() == (
        expected.split()
    )


def test_all_tests_are_in_a_leg():
    legs = dict(re.findall(r'leg "(.+?)" +(.+)', dry_run("--file=.ci/legs.mk")))

    for mpi in "MPICH", "MPICH without shared memory", "Open MPI":
        for size in 2, 3, 4:
            line = legs.pop(f"{mpi}, {size} ranks")
            command, apart = line.split(), "without" in mpi
            assert f"test-{size}" in command
            assert ("mpi_short=0" in line) == (apart and size == 3)
            assert ("MPI=openmpi" in command) == (mpi == "Open MPI")
            assert ("MPIR_CVAR_NOLOCAL=1" in command) == apart
    assert set(legs) == {
        "environment of MPICH",
        "other environments",
        "MPICH, whole programs",
        "Open MPI, whole programs",
        "MPICH, several hosts",
        "Open MPI, several hosts",
        "PyTorch and JAX",
        "single processes and single ranks, test-device",
        "single processes and single ranks, test-checks",
        "single processes and single ranks, test-1-openmpi",
        "single processes and single ranks, test-1",
        "single processes and single ranks, test-newest-cupy",
        "single processes and single ranks, test-oldest-cupy",
        "single processes and single ranks, test-unit",
        "lint",
        "documentation",
        "shell scripts",
    }

"""What `make` passes on to pytest, and the legs of .ci/run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

# How tests place ranks on nodes: those of tests/mpi/reducing.py, which needs MPI.
NODES = "halves", "apart", "singles", "uneven"

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


def nodes_of(line):
    """Return the made-up nodes of a leg."""
    chosen = re.search(r"mpi_nodes=([\w,]+)", line)
    return {*chosen[1].split(",")} if chosen else {*NODES}


def each_with_all(placed, dimension):
    """Return the nodes tested with each MPI (0), or on each number of ranks (1)."""
    found = {}
    for key, nodes in placed.items():
        # Twins are one: see `skip_reason` of tests/mpi/on_nodes.py.
        different = nodes - {"uneven"} if key[1] == 3 else nodes
        if key[1] > 2:
            found.setdefault(key[dimension], set()).update(different)
    return [*found.values()]


def test_all_tests_are_in_a_leg():
    shown = dry_run("--file=.ci/legs.mk").replace("\\\n", "")
    legs = dict(re.findall(r'leg "(.+?)" +(.+)', shown))

    placed = {}
    for mpi in "MPICH", "MPICH without shared memory", "Open MPI":
        for size in 2, 3, 4:
            line = legs.pop(f"{mpi}, {size} ranks")
            if mpi != "MPICH without shared memory":
                placed[mpi, size] = nodes_of(line)
            command, apart = line.split(), "without" in mpi
            assert f"test-{size}" in command
            assert ("mpi_short=0" in line) == (apart and size == 3)
            assert ("MPI=openmpi" in command) == (mpi == "Open MPI")
            assert ("MPIR_CVAR_NOLOCAL=1" in command) == apart
    # Each way to place ranks on nodes, with each MPI and on each number of ranks.
    assert each_with_all(placed, 0) == [{*NODES}] * 2
    # On 3 ranks two ways are the same, on 2 ranks all are.
    assert each_with_all(placed, 1) == [{*NODES} - {"uneven"}, {*NODES}]
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

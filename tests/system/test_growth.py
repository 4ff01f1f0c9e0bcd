"""What calls cost on many ranks and nodes, made up on this machine."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from ..formulas import check
from .conftest import REPOSITORY

# Ranks and nodes. Half of the time is that of starting 64 programs: 15 s on 2 cores.
LAYOUTS = [(4, 2), (16, 4), (64, 16)]
LIMIT = 240


@pytest.fixture
def layouts(mpiexec):
    """Return those that start soon enough: Open MPI needs much longer than MPICH."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True)
    return LAYOUTS if "HYDRA" in version.stdout else LAYOUTS[:-1]


def test_costs_on_many_ranks_are_those_of_the_table(mpirun, layouts):
    arguments = [f"{ranks}/{nodes}" for ranks, nodes in layouts]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    program = ("-m", "tests.mpi.growth", *arguments)
    env = {"PYTHONPATH": path}
    result = mpirun(max(layouts)[0], *program, timeout=LIMIT, env=env)

    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    for layout, line in zip(layouts, lines, strict=True):
        ranks, nodes, costs = json.loads(line)
        assert (ranks, nodes) == layout
        check(costs, ranks, nodes)

"""Nodes whose /dev/shm is nearly full: an error on every rank, and no signal.

They have a /dev/shm of their own, for which one must be root. Where it cannot be
mounted these tests are skipped, unless HPCACCUM_REQUIRE_SHM=1.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest

# That of a container, if nothing else is said; MPI itself takes a part of it.
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"

PROGRAM = """
import os, sys
import numpy as np
from mpi4py import MPI
import hpcaccum as hpc

kind, world = sys.argv[1], MPI.COMM_WORLD
groups = {"world": world, "apart": world.Split(world.rank)}
for comm in groups.values():
    hpc.Group.of(comm)
world.Barrier()
state = os.statvfs("/dev/shm")
free = world.bcast(state.f_bavail * state.f_frsize)
world.Barrier()
if kind == "brim":
    # All but 8 KiB: two gradients and one result.
    layout = hpc.Layout({"x": ((free - 8192) // 4 // 3,)}, "f4")
    made = hpc.Reducer(layout, groups["world"], schedule="shared")
elif kind == "reducers":
    # Each alone could be made.
    layout = hpc.Layout({"x": (free // 10 * 3 // 4,)}, "f4")
    made = hpc.Reducer(layout, groups["apart"], schedule="shared")
elif kind == "sums":
    # Two of them, in a window of MPI.
    made = hpc.ConditionalAccumulator("f4", ((free - 8192) // 8,), storage="sum")
else:
    made = hpc.ConditionalAccumulator(
        "f4", (free // 100 * 18 // 4,), comm=groups["world"], storage="slots"
    )
    with made:
        made.apply_grad(np.ones(free // 100 * 18 // 4), 0)
    made = hpc.Reducer(hpc.Layout({"x": (free // 5 // 4,)}, "f4"), world)
    made.arrays()["x"][:] = 1
    assert made.reduce()["x"][-1] == 1
    made.free()
    sys.stdout.write("worked\\n")
world.Barrier()
"""


@pytest.fixture
def on_a_small_node(mpirun, tmp_path):
    """Return what runs a job of two ranks in 64 MiB of /dev/shm."""
    probe = ["unshare", "--mount", "sh", "-c", MOUNT]
    try:
        problem = subprocess.run(
            probe, capture_output=True, text=True, check=False
        ).stderr.strip()
    except FileNotFoundError as error:
        problem = str(error)
    if problem and os.environ.get("HPCACCUM_REQUIRE_SHM") != "1":
        pytest.skip(f"a small /dev/shm cannot be mounted: {problem}")
    assert not problem, problem
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run(kind):
        # The launcher too: it makes files of its own there.
        return mpirun(2, script, kind, inside=MOUNT, env={"MPIR_CVAR_NOLOCAL": "0"})

    return run


def test_what_fits_works_again_and_again(on_a_small_node):
    result = on_a_small_node("fits")

    assert result.returncode == 0, result.stdout
    assert result.stdout.count("worked") == 2


@pytest.mark.parametrize("kind", ["brim", "reducers", "sums"])
def test_memory_that_runs_out_is_an_error(on_a_small_node, kind):
    result = on_a_small_node(kind)

    assert result.returncode != 0
    assert re.search(
        r"InvalidArgumentError: .*needs \d+\.\d MiB of /dev/shm.*--shm-size",
        result.stdout,
    ), result.stdout
    assert not re.search("bus error|segmentation", result.stdout, re.IGNORECASE)

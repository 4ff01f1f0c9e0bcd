"""Leaders of nodes that contribute no more, while their nodes go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts, obstacle

REPOSITORY = Path(__file__).parents[2]

# Seconds; it takes 5.
WAIT = 300

# On three hosts with two ranks each. Rank 2, which leads h2, leaves and waits. Rank 4,
# which leads h3, ends its program. Rank 5, also on h3, has a gradient of another shape.
PROGRAM = """
import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

comm = MPI.COMM_WORLD
w = hpc.Variable(np.zeros(1000), "w")
opt = {optimizer}
step = lambda: opt.minimize(lambda: (0.0, [np.ones(1000)]), var_list=[w])
step()
if comm.rank == 2:
    opt.leave()
elif comm.rank == 5:
    before = opt.statistics().accepted[5], opt.statistics().dropped[5]
    try:
        opt.apply_gradients([(np.ones(999), w)])
    except hpc.InvalidArgumentError as error:
        print("refused:", error, flush=True)
    assert (opt.statistics().accepted[5], opt.statistics().dropped[5]) == before
if comm.rank not in (2, 4):
    for _ in range(20):
        step()
if comm.rank != 4:
    opt.free()
    assert (w.value == -opt.global_step).all(), (w.value[0], opt.global_step)
    line = f"the end after {{opt.statistics().accepted}}\\n"
    print(line, end="", flush=True)
"""


@pytest.mark.parametrize(
    "optimizer",
    [
        "hpc.SyncReplicasOptimizer(hpc.SGD(1.0), comm.size)",
        "hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 1000)",
    ],
    ids=["sync-replicas", "drop-stale"],
)
def test_nodes_go_on_when_their_leaders_do_not(tmp_path: Path, optimizer: str):
    if reason := obstacle():
        pytest.skip(f"hosts {reason}")
    command = (sys.executable, "-c", PROGRAM.format(optimizer=optimizer))
    with hosts(tmp_path, 3, rate="1gbit") as cluster:
        done = cluster.run(2, *command, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    assert "refused: gradient of 'w' must have shape (1000,), got (999,)" in done.stdout
    # Nobody waited for the two leaders, and no gradient was lost.
    assert done.stdout.count("the end after (21, 21, 1, 21, 1, 21)") == 5, done.stdout

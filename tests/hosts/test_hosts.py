"""Ranks on several hosts, with a network between them and shared memory within.

Where no hosts can be made these tests are skipped, unless HPCACCUM_REQUIRE_HOSTS=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts as module
from tests.cluster.hosts import Cluster, hosts, obstacle

REPOSITORY = Path(__file__).parents[2]

# Seconds; a job here takes 2 to 20.
WAIT = 300

# Every strategy and storage, every schedule for ranks that do not share memory, and a
# server on each host.
TESTS = tuple(
    f"tests/mpi/test_{name}.py"
    for name in ("plain_model", "schedules", "servers", "sparse_nodes")
)
SELECTED = (
    "plain_model or (flat or hierarchical) and not (apart or uneven)"
    " and (means_equal_numpy or wire_format or sums_are_not_divided)"
    " or real and (of_one_step or applied_in_order or Adam or plain_formulas or behind)"
)

# Prints the host of each rank, with how many ranks it shares memory and a folder.
SHAPE = """
import json, pathlib, socket
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
pathlib.Path(f"/dev/shm/rank-{comm.rank}").touch()
comm.Allreduce(MPI.IN_PLACE, np.ones(1 << 20, np.float32))
files = len(list(pathlib.Path("/dev/shm").glob("rank-*")))
comm.Barrier()
pathlib.Path(f"/dev/shm/rank-{comm.rank}").unlink()
shape = comm.gather((socket.gethostname(), node.size, files))
if comm.rank == 0:
    print(json.dumps(shape))
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    reason = obstacle()
    if reason and os.environ.get("HPCACCUM_REQUIRE_HOSTS") == "1":
        pytest.fail(f"HPCACCUM_REQUIRE_HOSTS=1, but hosts {reason}")
    if reason:
        pytest.skip(f"hosts {reason}")


@pytest.fixture(scope="module", params=[2, 4], ids=["2-hosts", "4-hosts"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("hosts")
    with hosts(directory, request.param, rate="1gbit") as running:
        yield running


@pytest.fixture
def ranks(cluster: Cluster) -> int:
    """Ranks on each host: 4 on all of them."""
    return 4 // len(cluster.names)


def test_ranks_of_a_host_share_memory_and_others_a_network(
    cluster: Cluster, ranks: int
):
    before = cluster.traffic()
    done = cluster.run(ranks, sys.executable, "-c", SHAPE, timeout=WAIT)
    after = cluster.traffic()

    assert done.returncode == 0, done.stdout
    # Beside warnings of mpiexec.
    [line] = [line for line in done.stdout.splitlines() if line.startswith('[["h1"')]
    assert json.loads(line) == [
        [name, ranks, ranks] for name in cluster.names for _ in range(ranks)
    ]
    for name in cluster.names:
        # An Allreduce of 4 MiB; with shared memory, some 50 KB are left.
        assert after[name].sent - before[name].sent > 1 << 22
        assert after[name].received - before[name].received > 1 << 22


def test_results_are_those_of_one_process(cluster: Cluster, ranks: int):
    pytest_options = ("-q", "-k", SELECTED, "--color=no")
    program = (sys.executable, "-m", "pytest", *TESTS, *pytest_options)
    done = cluster.run(ranks, *program, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout, done.stdout


def test_links_have_the_rate_in_both_directions(cluster: Cluster):
    tc = ("tc", "qdisc", "show")
    # Open MPI's launcher may miss the end of programs that end at once.
    slowly = ("sh", "-c", f"{' '.join(tc)}; sleep 1")
    outgoing = cluster.run(1, *slowly, timeout=WAIT).stdout
    incoming = subprocess.run([*cluster.enter, *tc], capture_output=True, text=True)

    for found in (outgoing, incoming.stdout):
        assert found.count("rate 1Gbit") == len(cluster.names), found


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path):
    program = "import time; print('started', flush=True); time.sleep(1000)"
    job = ("-n", "2", "--", sys.executable, "-c", program)
    shown = b""
    with subprocess.Popen(
        [sys.executable, module.__file__, *job],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    ) as killed:
        try:
            assert killed.stdout
            # What two ranks print at once may be on one line.
            for line in killed.stdout:
                shown += line
                if shown.count(b"started") == 2:
                    break
            assert shown.count(b"started") == 2, shown
            assert len(processes(tmp_path)) > 4
        finally:
            # The end of the block waits for it.
            killed.kill()

    limit = time.monotonic() + WAIT
    while left := processes(tmp_path):
        assert time.monotonic() < limit, f"processes {left} are left"
        time.sleep(0.05)


def processes(directory: Path) -> list[int]:
    """Return the processes whose environment has that path."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(directory) in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            pass  # it has just ended
    return found

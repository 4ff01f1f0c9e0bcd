"""A node whose ranks stop for some time, and which other nodes wait for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster, hosts

REPOSITORY = Path(__file__).parents[2]

# Seconds; a job here takes 5 to 10.
WAIT = 300
RANKS, HOSTS = 2, 3
# Updates that others must make while a node is stopped.
MANY = 10
# Elements of 8 bytes: of a gradient that is asked for, and of one that is sent at once.
LONG, SHORT = 4000, 1000

# Beginning of the programs. `stop` stops all ranks of a host, for two seconds and until
# somebody writes the file "counted".
STOP = """
import json, os, subprocess, sys, threading, time
from pathlib import Path

import numpy as np
import hpcaccum as hpc
from mpi4py import MPI

sys.path.append(os.getcwd())
from tests import internals

flags, arguments = Path(sys.argv[1]), sys.argv[2:]
comm, host = MPI.COMM_WORLD, MPI.Get_processor_name()
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
pids = " ".join(str(each) for each in node.allgather(os.getpid()))

def await_flag(name):
    while not (flags / name).exists():
        time.sleep(0.002)

def stop():
    # After the barrier, all ranks of the host are here.
    node.Barrier()
    if node.rank == 0:
        subprocess.Popen(["sh", "-c", f'''
            kill -STOP {pids}
            : >{flags}/stopped
            sleep 2
            : >{flags}/over
            while [ ! -e {flags}/counted ]; do sleep 0.02; done
            kill -CONT {pids}
        '''])
    await_flag("over")
"""

# Rank 0 prints at which step the others were when h3 was stopped and continued.
TRAIN = (
    STOP
    + """
strategy, option, moment = arguments[0], int(arguments[1]), arguments[2]
many, (servers, size) = int(arguments[3]), json.loads(arguments[4])
w = hpc.Variable(np.zeros(size), "w")
if strategy == "sync":
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), option, servers=servers)
else:
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), option, servers=servers)
opt.initialize([w])
calls, steps, pushes, held = 0, [], moment == "pushed", False
elsewhere = [rank for rank, name in enumerate(comm.allgather(host)) if name != "h3"]

def hold():
    # All ranks come here at the same step: none waits for an update that it lacks.
    global held
    held = True
    if host == "h3":
        # No other rank has a gradient in the open round from now on.
        for rank in elsewhere:
            await_flag(f"paused-{rank}")
    else:
        (flags / f"paused-{comm.rank}").touch()
        await_flag("stopped")

def loss():
    if pushes and not held and internals.own_step(opt) >= 3:
        hold()
    elif not pushes and calls == 3 and host == "h3":
        stop()
    return 0.0, [np.ones(size)]

def stop_after(_, receipt):
    if held and receipt and not (flags / "stopped").exists():
        stop()

if host == "h3":
    internals.before("pushed", opt, stop_after).start()

def watch():
    await_flag("stopped")
    steps.append(opt.global_step)
    await_flag("over")
    while opt.global_step < steps[0] + many:
        time.sleep(0.002)
    steps.append(opt.global_step)
    (flags / "counted").touch()

if comm.rank == 0:
    threading.Thread(target=watch, daemon=True).start()
left = 5
while left:
    left -= (flags / "counted").exists()
    opt.minimize(loss, var_list=[w])
    calls += 1
opt.free()
assert (w.value == -opt.global_step).all(), (w.value[0], opt.global_step)
if comm.rank == 0:
    steps.append(opt.global_step)
    dropped = opt.statistics().dropped
    print("\\n" + json.dumps({"steps": steps, "dropped": dropped}), flush=True)
"""
)

# Rank 0 waits for the sum of h3, in vain and with success. The gradients are too long
# to be sent with the requests to admit them.
SUM = (
    STOP
    + """
size = int(arguments[0])
acc = hpc.ConditionalAccumulator("f8", (size,))
assert acc.apply_grad(np.ones(size))
comm.allgather(None)
if host == "h3":
    stop()
elif comm.rank == 0:
    await_flag("stopped")
    try:
        with internals.limits(sums=0.2):
            acc.take_grad(comm.size, timeout=0.2)
    except hpc.WaitTimeoutError as error:
        print("\\n" + json.dumps(str(error)), flush=True)
    (flags / "counted").touch()
    assert (acc.take_grad(1) == 1).all()
comm.allgather(None)
acc.free()
"""
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("hosts")
    with hosts(directory, HOSTS, rate="1gbit") as running:
        yield running


def run(cluster: Cluster, program: str, flags: Path, *arguments: object) -> Any:
    """Run a program; return what rank 0 printed."""
    command = (sys.executable, "-c", program, flags, *map(str, arguments))
    done = cluster.run(RANKS, *command, cwd=REPOSITORY, timeout=WAIT)

    assert done.returncode == 0, done.stdout
    [line] = [line for line in done.stdout.splitlines() if line[:1] in ('"', "{")]
    return json.loads(line)


def train(
    cluster: Cluster,
    flags: Path,
    *arguments: object,
    servers: object = None,
    size: int = LONG,
):
    return run(cluster, TRAIN, flags, *arguments, json.dumps([servers, size]))


@pytest.mark.parametrize("servers", [None, [0, 2]], ids=["one-server", "two-servers"])
def test_others_go_on_without_a_stopped_node(
    cluster: Cluster, tmp_path: Path, servers: list[int] | None
):
    # Four gradients make an update, and two ranks are stopped.
    found = train(cluster, tmp_path, "sync", 4, "computing", MANY, servers=servers)
    stopped, continued, last = found["steps"]

    assert continued >= stopped + MANY
    assert last > continued


def test_others_go_on_if_each_gradient_is_an_update(cluster: Cluster, tmp_path: Path):
    staleness = 8
    found = train(cluster, tmp_path, "drop", staleness, "computing", MANY)
    stopped, continued, last = found["steps"]

    assert continued >= stopped + MANY
    assert last > continued
    # The gradients that the two were computing are too old.
    assert all(found["dropped"][-RANKS:])


@pytest.mark.parametrize(
    ("quorum", "moment"), [(6, "computing"), (4, "pushed")], ids=["required", "pushed"]
)
def test_a_round_waits_for_a_stopped_node_that_takes_part(
    cluster: Cluster, tmp_path: Path, quorum: int, moment: str
):
    found = train(cluster, tmp_path, "sync", quorum, moment, 0)
    stopped, continued, last = found["steps"]

    assert continued == stopped
    # Each rank has made five more gradients since.
    assert last >= stopped + 5


def test_a_short_gradient_of_a_stopped_node_is_there(cluster: Cluster, tmp_path: Path):
    # It came with the request to admit it.
    found = train(cluster, tmp_path, "sync", 4, "pushed", MANY, size=SHORT)
    stopped, continued, last = found["steps"]

    assert continued >= stopped + MANY
    assert last > continued


def test_all_updates_wait_for_a_server_that_is_stopped(
    cluster: Cluster, tmp_path: Path
):
    found = train(cluster, tmp_path, "sync", 4, "computing", 0, servers=[0, 2, 4])
    stopped, continued, last = found["steps"]

    # It may be stopped after its part of an update, when the others make theirs.
    assert continued <= stopped + 1
    assert last >= stopped + 5


def test_the_node_that_is_waited_for_is_named(cluster: Cluster, tmp_path: Path):
    found = run(cluster, SUM, tmp_path, LONG)

    assert ": take_grad(6): waited " in found, found
    assert found.endswith(" s for the sum of node h3 (leader rank 4)"), found

"""A rank is killed, and the others train on; or all end with the status 75."""

from __future__ import annotations

import re
import signal

import pytest
from mpi4py.MPI import get_vendor

from hpcaccum.errors import RESTART

from ..common import every_pair, every_second, json_lines
from .conftest import BEGIN, REPOSITORY

MPICH = get_vendor()[0] == "MPICH"
# Without shared memory, each rank is a node, which is lost with it.
LEGS = ["memory", "messages"] if MPICH else ["memory"]
# UCX aborts a rank whose read of another one's memory finds no process any more.
MESSAGES = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "posix,self"}

# The last rank is killed at the fifth call of a method, before or after that; tests may
# replace rank and call. Element r of a gradient of rank r is 1, the others are 0: so
# element r counts what is applied.
KILLED = (
    BEGIN
    + """
from tests import internals

kind, place, when = sys.argv[1:]
calls = 0

def die():
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)

def act(moment, _):
    if moment == when:
        die()

gradient = np.zeros(size, np.float32)
gradient[rank] = 1
if rank == size - 1 and "." in place:
    internals.around(place, act)
"""
)

TRAIN = (
    KILLED
    + """
def loss():
    if rank == size - 1 and place == "loss":
        die()
    return 0.0, [gradient]

w = hpc.Variable(np.zeros(size, np.float32), "w")
if kind == "drop_stale":
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 3, comm=comm)
elif kind == "agn":
    getter = hpc.AGNCustomGetter()
    w = hpc.get_variable("w", np.zeros(size, np.float32), custom_getter=getter)
    opt = hpc.AGNOptimizer(hpc.SGD(1.0), size, getter, communication_period=2)
elif kind == "cross_shard":
    opt = hpc.CrossShardOptimizer(hpc.SGD(1.0))
else:
    quorum = size if kind == "sync_replicas" else size - 1
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), quorum, size, comm=comm)
accepted = 0
while accepted < 10:
    accepted += bool(opt.minimize(loss, var_list=[w]))
    time.sleep(0.002)
opt.free()
applied, steps = -w.value, opt.global_step
if kind in ("drop_stale", "agn"):
    # Each gradient is an update; of AGN, the mean of two.
    assert applied[rank] == accepted / (1 + (kind == "agn")), (applied, accepted)
    assert 0 <= applied[-1] <= 10, applied
else:
    # The means of all updates add up to 1, for any share of each rank.
    assert np.isclose(applied.sum(), steps), (applied, steps)
print(f"rank {rank} has the end", flush=True)
"""
)

ACCUMULATE = (
    KILLED
    + """
acc = hpc.ConditionalAccumulator("float32", (size,), storage=kind)
for step in range(12):
    acc.apply_grad(gradient, local_step=1 << 30)
    if rank == size - 1:
        assert np.isclose(acc.take_grad(1, timeout=60).sum(), 1)
acc.leave()
while not acc.statistics().lost:
    # Its takes would wait for the gradients that this rank takes.
    time.sleep(0.01)
try:
    while rank == 0:
        assert np.isclose(acc.take_grad(size, timeout=60).sum(), 1)
except hpc.EverybodyLeftError:
    found = acc.statistics()
    assert found.lost == (size - 1,), found
acc.free()
print(f"rank {rank} has the end", flush=True)
"""
)

SUBMIT = [
    ("server.bounded_staleness.BoundedStalenessInbox.admit", "before"),
    ("server.bounded_staleness.BoundedStalenessInbox.admit", "after"),
    ("server.bounded_staleness.BoundedStalenessInbox.put", "after"),
    ("loss", "before"),
]
# Between nodes, agents of others admit a gradient.
ASK = [("nodes.calls.Calls.begin", "before"), ("nodes.calls.Call.result", "before")]
WRITE = [
    ("mpi.memory.atomic_words.AtomicWords.compare_and_swap", "before"),
    ("accumulator.protocol.AdmissionProtocol.admit", "after"),
    ("accumulator.protocol.AdmissionProtocol.arrive", "before"),
    ("accumulator.protocol.AdmissionProtocol.arrive", "after"),
]
TAKE = [
    ("accumulator.turns.TicketLock.draw", "after"),
    ("accumulator.protocol.AdmissionProtocol.put_closing", "after"),
    ("accumulator.take.Take._close", "after"),
    ("accumulator.take.Take._found", "after"),
    ("accumulator.protocol.AdmissionProtocol.clear_records", "after"),
]
# Between nodes, an agent takes for the rank.
ASK_TAKE = [
    *ASK,
    ("accumulator.host_calls.FarTake.wait", "before"),
    ("accumulator.host_calls.FarTake.wait", "after"),
]


STORAGES = {"slots": "storage.Buffers", "sum": "storage.Sums"}


@pytest.fixture(params=LEGS)
def survives(request, mpirun, script):
    """Run a program, one rank of which is killed; check that the others end well."""
    env = MESSAGES if request.param == "messages" else {}

    def run(program, *args, ranks=3, lost=1):
        result = mpirun(
            ranks, script(program), *args, survive=True, env=env, timeout=40
        )
        ends = re.findall(r"rank (\d) has the end", result.stdout)
        assert sorted(ends) == [str(r) for r in range(ranks - lost)], result.stdout
        assert "Traceback" not in result.stdout
        found = re.findall(r"rank (\d) \(process \d+ on .+\) is lost", result.stdout)
        expected = {str(rank) for rank in range(ranks - lost, ranks)}
        assert set(found) == expected, result.stdout
        return result.stdout

    return run


@pytest.mark.parametrize(("place", "when"), every_second(SUBMIT))
@pytest.mark.parametrize("survives", ["memory"], indirect=True)
def test_single_updates_go_on(survives, place, when):
    survives(TRAIN, "drop_stale", place, when)


@pytest.mark.parametrize(("place", "when"), every_second(WRITE))
@pytest.mark.parametrize("survives", ["memory"], indirect=True)
def test_rounds_go_on(survives, place, when):
    survives(TRAIN, "sync_replicas", place, when)


@pytest.mark.skipif(not MPICH, reason="only MPICH can do without shared memory")
@pytest.mark.parametrize("kind", ["drop_stale", "sync_replicas"])
@pytest.mark.parametrize(("place", "when"), every_second(ASK))
@pytest.mark.parametrize("survives", ["messages"], indirect=True)
def test_nodes_go_on(survives, kind, place, when):
    survives(TRAIN, kind, place, when)


@pytest.mark.parametrize("kind", ["agn", "quorum"])
def test_strategies_go_on(survives, kind):
    survives(TRAIN, kind, "loss", "before", ranks=4 if kind == "quorum" else 3)


FRAGMENTS = (
    KILLED
    + """
def loss():
    if rank == size - 1:
        die()
    return 0.0, [gradient, gradient]

both = [hpc.Variable(np.zeros(size, np.float32), name) for name in "vw"]
rules, options = (hpc.SGD(1.0), hpc.SGD(1.0)), {"fragments": 2, "overlap": 1}
opt = hpc.LocalStepsOptimizer(*rules, 4, quorum=size, **options)
for _ in range(20):
    opt.minimize(loss, var_list=both)
    time.sleep(0.002)
opt.free()
# Each update is a mean of as many steps of any ranks; the last ones are 20 and 18.
assert np.allclose([-each.value.sum() for each in both], [20, 18]), both
print(f"rank {rank} has the end", flush=True)
"""
)


def test_fragments_go_on(survives):
    survives(FRAGMENTS, "", "loss", "before")


@pytest.mark.parametrize(
    ("kind", "later"), [("drop_stale", 0), ("sync_replicas", 0), ("sync_replicas", 30)]
)
def test_two_ranks_are_lost(survives, kind, later):
    """At once; or one after the other, when it is known that the first is lost."""
    program = TRAIN.replace("rank == size - 1", "rank >= size - 2")
    moment = f"calls == 5 + {later} * (rank == size - 2)"
    program = program.replace("calls == 5", moment).replace(
        "while accepted < 10", f"while accepted < {10 + later}"
    )
    survives(program, kind, "loss", "before", ranks=4, lost=2)


NODES = """
halves = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
comm = hpc.Group(MPI.COMM_WORLD.Dup(), halves)
"""


@pytest.mark.parametrize("kind", ["drop_stale", "sync_replicas"])
@pytest.mark.parametrize("survives", ["memory"], indirect=True)
def test_a_node_is_lost_with_its_first_rank(survives, kind):
    program = TRAIN.replace("comm = MPI.COMM_WORLD\n", NODES)
    program = program.replace("rank == size - 1", "rank == size - 2")
    output = survives(program, kind, "loss", "before", ranks=4, lost=2)

    assert re.search("rank 3 of 4 ends: .*rank 3 .* is lost with its node", output)


@pytest.mark.parametrize(
    ("moment", "kind", "survives"),
    every_second(every_pair(TAKE, ["slots", "sum"], ["memory"])),
    indirect=["survives"],
)
def test_takes_go_on(survives, kind, moment):
    survives(ACCUMULATE, kind, *moment)


@pytest.mark.skipif(not MPICH, reason="only MPICH can do without shared memory")
@pytest.mark.parametrize(
    ("moment", "kind", "survives"),
    every_second(every_pair(ASK_TAKE, ["slots", "sum"], ["messages"])),
    indirect=["survives"],
)
def test_takes_of_other_nodes_go_on(survives, kind, moment):
    survives(ACCUMULATE, kind, *moment)


@pytest.mark.parametrize(
    ("when", "kind", "survives"),
    every_second(every_pair(["before", "after"], ["slots", "sum"], LEGS)),
    indirect=["survives"],
)
def test_writes_go_on(survives, kind, when):
    # The contents of a gradient are not part of the request to admit it.
    apart = "from hpcaccum.nodes import transfer\ntransfer.SHORT = 0\n"
    survives(apart + ACCUMULATE, kind, f"accumulator.{STORAGES[kind]}.write", when)


UPDATE = (
    KILLED.split("gradient = ")[0].replace("calls == 5", "calls == 2")
    + """
def work(self, chunk, update, scratch):
    if rank == 0:
        # So that the other ranks do most pieces.
        time.sleep(0.002)
    if rank == size - 1 and when == "half":
        if calls == 1:
            self._slots[0][chunk][:500], self._center[chunk][:300] = 7, 9
        die()
    make(self, chunk, update, scratch)
    if rank == size - 1 and when == "made":
        die()

def saving(self, *args):
    for chunk in save(self, *args):
        if rank == size - 1 and when == "saved":
            die()
        yield chunk
    if rank == size - 1 and when == "done":
        die()

from hpcaccum.server.node_update import NodeUpdate as cls
make, save = cls._work_on_chunk, cls._saving
cls._work_on_chunk, cls._saving = work, saving
with internals.limits(chunk=1000, least=4000, most=4000, thread=4000):
    w = hpc.Variable(np.zeros(40000, np.float32), "w")
    opt = hpc.SyncReplicasOptimizer(hpc.Momentum(0.5, 0.9), size)
    for step in range(12):
        values = np.full(40000, step % 3 + 1, np.float32)
        opt.minimize(lambda: (0.0, [values]), var_list=[w])
    opt.free()
cls._work_on_chunk, cls._saving = make, save
value = momentum = np.zeros(40000, np.float32)
for step in range(12):
    momentum = np.float32(0.9) * momentum + np.float32(step % 3 + 1)
    value = value - np.float32(0.5) * momentum
assert np.allclose(w.value, value, rtol=1e-6)
print(f"rank {rank} has the end", flush=True)
"""
)


@pytest.mark.parametrize("when", every_second(["half", "saved", "made", "done"]))
@pytest.mark.parametrize("survives", ["memory"], indirect=True)
def test_an_update_of_all_ranks_is_completed(survives, when):
    survives(UPDATE, "", "loss", when)


@pytest.fixture
def ends(mpirun, script):
    """Run a program, one rank of which is killed; check that the others end as well."""

    def run(program, *args, lost=2, timeout=40, **options):
        options |= {"survive": True, "timeout": timeout}
        result = mpirun(3, script(program), *args, **options)
        # MPICH combines the statuses of all ranks bit by bit.
        assert result.returncode & RESTART == RESTART, result.stdout
        assert f"rank {lost} (process " in result.stdout
        assert "has the end" not in result.stdout
        return result.stdout

    return run


def test_a_mean_of_all_ranks_ends_with_a_status(ends):
    output = ends(TRAIN, "cross_shard", "loss", "before")

    assert " is lost: its process has ended" in output
    assert "Traceback" not in output


# What MPICH and Open MPI print.
REASONS = "KILLED BY SIGNAL: 9", "Killed (signal 9)", "exited on\nsignal 9 (Killed)"


@pytest.mark.parametrize("place", ["loss", WRITE[-1][0]])
def test_a_launcher_that_ends_the_job_has_the_status_of_the_rank(mpirun, script, place):
    # The others may go on without it before the launcher ends the job.
    program = TRAIN.replace("accepted < 10", "accepted < 5000")
    result = mpirun(3, script(program), "sync_replicas", place, "before")

    assert result.returncode in (9, 128 + 9)
    assert any(reason in result.stdout for reason in REASONS), result.stdout
    assert "has the end" not in result.stdout
    assert "Traceback" not in result.stdout


def test_the_loss_of_the_server_ends_with_a_status(ends):
    program = TRAIN.replace("rank == size - 1", "rank == 0")
    ends(program, "drop_stale", "loss", "before", lost=0)


@pytest.mark.parametrize("dedicated", [False, True])
def test_too_few_workers_end_with_a_status(ends, dedicated):
    options = f", dedicated={dedicated}, min_workers={3 - dedicated}"
    program = TRAIN.replace("SGD(1.0), 3, comm=comm", f"SGD(1.0), 3{options}")
    serve = f"if {dedicated} and rank == 0:\n    opt.initialize([w])\n    opt.serve()\n"
    # Long enough that the loss is found before the end.
    program = program.replace("accepted = 0\n", f"{serve}accepted = -1000\n")
    ends(program, "drop_stale", "loss", "before")


FREE = (
    KILLED.replace("calls == 5", "calls == 1")
    + """
acc = hpc.ConditionalAccumulator("float32", (size,), storage=kind)
acc.apply_grad(gradient)
acc.free()
"""
)


@pytest.mark.skipif(not MPICH, reason="the error of Open MPI ends the job at once")
@pytest.mark.parametrize("leg", LEGS)
def test_a_loss_while_memory_is_freed_ends_with_a_status(ends, leg):
    env = MESSAGES if leg == "messages" else {}
    ends(FREE, "sum", "accumulator.storage.Sums.free", "before", env=env, timeout=25)


# The last rank is killed while it computes a gradient.
COMMAND = """
import os, signal
from mpi4py import MPI
from hpcaccum.train.model import MLP

compute, calls = MLP.loss_and_gradients, []

def dying(*args):
    calls.append(args)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(*args)

processes = MPI.COMM_WORLD.allgather(os.getpid())
if MPI.COMM_WORLD.rank == 3:
    MLP.loss_and_gradients = dying
"""


@pytest.fixture
def train(patched, tmp_path, digits):
    """Run a training that loses a rank; return the status, the output and the log."""
    words = "train", "--strategy", "drop-stale", "--data", digits, "--log", "log.jsonl"
    words += "--epochs", "6", *(f"--straggler={rank}:20" for rank in range(3))

    def run(before):
        result = patched(4, before, *words, cwd=tmp_path, survive=True)
        assert " is lost: its process has ended" in result.stdout, result.stdout
        assert "Traceback" not in result.stdout
        end = json_lines(tmp_path / "log.jsonl")[-1]
        assert end["event"] == "result", result.stdout
        assert end["accepted"][3] < 5
        return result.returncode, end

    return run


def test_a_training_reaches_its_end_without_a_rank(train):
    # MPICH sends the others SIGUSR1, with which SLURM asks a training to stop.
    status, end = train(COMMAND)

    # MPICH's mpiexec returns that of the shell of the rank that was killed.
    assert status == (128 + signal.SIGKILL if MPICH else 0)
    assert end["stopped"] == 0
    assert end["updates"] >= end["target"]


def test_a_training_that_is_asked_to_stop_may_lose_a_rank(train):
    # The others learn of the loss when they end.
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    ask = "[os.kill(each, signal.SIGTERM) for each in processes[:3]]"
    _, end = train(COMMAND.replace(kill, f"{ask}; {kill}"))

    assert end["stopped"] == RESTART


# The last rank stops; the others continue it when it is lost.
STOP = """
from tests import internals

kind = sys.argv[1]
stopped = comm.bcast(os.getpid(), size - 1)
gradient = np.zeros(size)
gradient[rank] = 1
w = hpc.Variable(np.zeros(size), "w")
acc = hpc.ConditionalAccumulator(
    "f8", (size,), storage="sum" if kind == "sum" else "slots", reduction_type="SUM"
)
opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 99)
opt.initialize([w])

def apply():
    if kind == "drop_stale":
        return opt.apply_gradients([(gradient, w)])
    return acc.apply_grad(gradient, 1 << 30)

if rank == size - 1:
    for _ in range(3):
        assert apply()
comm.Barrier()
total = acc.take_grad(1) if rank == 0 and kind != "drop_stale" else np.zeros(size)
comm.Barrier()
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        apply()
while not (acc.statistics().lost and internals.left(opt)):
    time.sleep(0.01)
if rank == 0:
    os.kill(stopped, signal.SIGCONT)
for _ in range(100):
    assert apply()
    if rank == 0 and kind != "drop_stale":
        total += acc.take_grad(1)
    time.sleep(0.002)
acc.leave()
try:
    while rank == 0:
        total += acc.take_grad(1)
except hpc.EverybodyLeftError:
    pass
acc.free()
opt.free()
if kind == "drop_stale":
    total -= w.value
if rank == 0:
    *others, last = total.tolist()
    # On another node, it may send more before it is told.
    assert last == 3 or (last > 3 and "MPIR_CVAR_NOLOCAL" in os.environ), total
    assert others == [100] * (size - 1), total
print(f"rank {rank} has the end", flush=True)
"""


# On another node, a rank that is continued may still add to the sum of all.
STOPS = [
    (leg, kind)
    for leg in LEGS
    for kind in ("slots", "sum", "drop_stale")
    if (leg, kind) != ("messages", "sum")
]


@pytest.mark.parametrize(("leg", "kind"), every_second(STOPS))
def test_a_rank_that_was_stopped_ends(mpirun, program, leg, kind):
    env = {"HPCACCUM_HEARTBEAT": "5"}
    env |= MESSAGES if leg == "messages" else {}
    result = mpirun(3, program(STOP), kind, survive=True, env=env, timeout=60)

    for text in (
        r"rank 2 \(process .*\) is lost: no heartbeat for 5 s",
        "rank 2 of 3 ends: .*rank 2 ",
        "rank 0 has the end",
        "rank 1 has the end",
    ):
        assert re.search(text, result.stdout), result.stdout
    assert "rank 2 has the end" not in result.stdout
    assert "Traceback" not in result.stdout
    # MPICH's mpiexec once failed here; `hpcaccum run` starts a job again then, too.
    failed = result.returncode == 255 and "process manager error" in result.stdout
    assert failed or result.returncode == RESTART


# Other seeds: python -m tests.soak --kill.
@pytest.mark.parametrize(("seed", "leg"), [(0, LEGS[0]), (1, LEGS[-1])])
def test_the_soak_goes_on_without_ranks(mpirun, leg, seed):
    env = {"HPCACCUM_TIMEOUT": "30"}
    env |= MESSAGES if leg == "messages" else {}
    args = "-m", "tests.soak", "--kill", 1 + seed % 2, "--seed", seed
    result = mpirun(4, *args, cwd=REPOSITORY, survive=True, env=env, timeout=60)

    assert "all is exact: " in result.stdout
    assert "Traceback" not in result.stdout


# The last rank dies when it is about to make some object of its own, or of the node.
START = """
from tests import internals

def die(*_):
    # The others are past the collective call before.
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)

if rank == size - 1:
    internals.around(sys.argv[1], die)
w = hpc.Variable(np.zeros(3), "w")
opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1)
opt.initialize([w])
print(f"rank {rank} has the end")
"""


@pytest.mark.parametrize(
    "place",
    every_second(
        [
            "mpi.Group.agree",
            "mpi.AtomicWords.__init__",
            # Here the others wait in MPI; Open MPI raises an error.
            *["mpi.memory.windows.creating"] * MPICH,
            "server.ParameterServer.__init__",
        ]
    ),
)
def test_a_loss_during_the_start_ends_with_a_status(ends, place):
    output = ends(BEGIN + START, place)

    # Open MPI's mpiexec may end the second one before it says so.
    text = r"rank [01] of 3 ends: .*rank 2 \(process \d+ on .+\) is lost: its process"
    assert re.search(text, output), output
    assert "Traceback" not in output

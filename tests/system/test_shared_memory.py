"""Nodes whose /dev/shm is nearly full, or which have another user.

They have a /dev/shm of their own, for which one must be root. Where it cannot be
mounted these tests are skipped, unless HPCACCUM_REQUIRE_SHM=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

# That of a container, if nothing else is said; MPI itself takes a part of it.
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"

PROGRAM = """
kind, world = sys.argv[1], MPI.COMM_WORLD
groups = {"world": world, "apart": world.Split(world.rank)}
for comm in groups.values():
    hpc.group_of(comm)
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
def own_shm():
    """Skip the test if no /dev/shm can be mounted."""
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


@pytest.fixture
def on_a_small_node(mpirun, own_shm, program):
    """Return what runs a job of two ranks in 64 MiB of /dev/shm."""
    path = program(PROGRAM)

    def run(kind):
        # The launcher too: it makes files of its own there.
        return mpirun(2, path, kind, inside=MOUNT, env={"MPIR_CVAR_NOLOCAL": "0"})

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


BECOME = """
import os, sys

def become(user):
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
"""

# A user without an account may not read what Python imports later.
JOB = f"""{BECOME}
import ctypes, hashlib, importlib, pkgutil

for module in pkgutil.walk_packages(hpc.__path__, "hpcaccum."):
    if module.name.split(".")[1] in ("mpi", "accumulator", "reducer", "nodes"):
        importlib.import_module(module.name)
become(int(sys.argv[1]))
# MPI may copy between processes, and others look at them.
ctypes.CDLL(None).prctl(4, 1)
layout = hpc.Layout({{"x": (1000,)}}, "f4")
gradient = np.full(1000, 7, np.float32)
for turn in range(15):
    with hpc.Reducer(layout, schedule="shared") as reducer:
        reducer.arrays()["x"][:] = gradient
        assert (reducer.reduce()["x"] == 7).all()
    with hpc.ConditionalAccumulator("f4", (1000,)) as accumulator:
        accumulator.apply_grad(gradient, 0)
        hpc.group_of().allgather(None, "all have applied")
        if rank == 0:
            assert (accumulator.take_grad(2) == 7).all()
        hpc.group_of().allgather(None, "one has taken")
if rank == 0:
    print("right")
"""

# It sees each name of a file, tries to open that file, and makes files with the names
# that might come next. Who opens one of these must wait until it is unlinked, and so
# notices nothing.
ATTACKER = f"""{BECOME}
import ctypes, fcntl, signal, struct, time

found, planted, job = [], {{}}, os.getppid()
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.umask(0)
os.chdir("/dev/shm")
libc = ctypes.CDLL(None)
events = libc.inotify_init1(os.O_NONBLOCK)
libc.inotify_add_watch(events, b".", 0x100)
open(sys.argv[2], "w").close()
become(int(sys.argv[1]))

def names():
    data = b""
    try:
        data = os.read(events, 1 << 16)
    except BlockingIOError:
        pass
    while data:
        length = struct.unpack("iIII", data[:16])[3]
        yield data[16:16 + length].strip(b"\\0").decode()
        data = data[16 + length:]

def following(name):
    stem, _, last = name.rpartition("-")
    for more in range(1, 60):
        yield f"{{stem}}-{{int(last, 16) + more:0{{len(last)}}x}}"
        if last.isdigit():
            yield f"{{stem}}-{{int(last) + more}}"

seen = 0
while os.getppid() == job:
    for name in names():
        if not name.startswith("hpcaccum-") or name in planted:
            continue
        seen += 1
        try:
            found.append(f"opened {{name}} as {{os.open(name, os.O_RDWR)}}")
        except OSError:
            pass
        for other in following(name):
            try:
                file = os.open(other, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                planted[other] = file
            except OSError:
                pass
    for name, file in planted.items():
        awaited = fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_WRLCK
        if awaited and os.path.exists(name):
            time.sleep(0.05)
            os.unlink(name)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        if any(os.pread(file, 1 << 16, 0)):
            found.append(f"read {{name}}")
    time.sleep(1e-4)
print(f"saw {{seen}} names", *dict.fromkeys(found), sep="\\n")
"""


@pytest.mark.parametrize("user", [0, 61001], ids=["root", "user"])
def test_another_user_gets_no_gradients(mpirun, own_shm, tmp_path, program, user):
    attacker, ready = tmp_path / "attacker.py", tmp_path / "ready"
    attacker.write_text(ATTACKER)
    words = f"{sys.executable} {attacker} 61002 {ready} &"
    inside = f"{MOUNT} && {{ {words} until test -e {ready}; do sleep 0.05; done; }}"
    env = {"MPIR_CVAR_NOLOCAL": "0"}
    options = {"inside": inside, "env": env, "timeout": 60, "status": 0}
    # It ends when the attacker has ended, too.
    result = mpirun(2, program(JOB), str(user), **options)

    assert "right" in result.stdout
    assert re.findall(r"(?:opened|read) .*", result.stdout) == []
    assert int(re.search(r"saw (\d+) names", result.stdout)[1]) >= 30

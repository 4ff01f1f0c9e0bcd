"""The probes of `hpcaccum doctor`: small MPI programs whose answers are known.

Each probe is collective and returns a `Finding`, of which that of rank 0 counts. Its
docstring is what was tried.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.device import cupy
from hpcaccum.dtypes import HALVES
from hpcaccum.errors import DeviceUnavailableError, counted
from hpcaccum.machine import free_memory
from hpcaccum.mpi import MPI, cuda_awareness, number_in
from hpcaccum.nodes import words_of

GOOD, NOTE, BAD = "ok", "note", "problem"
# The name of the probe that kills a rank.
LOSS = "lost rank"

_SHM = Path("/dev/shm")
# Names of what MPI libraries and hpcaccum leave there if their ranks are killed.
_LEFT = ("mpich_shm_*", "hpcaccum-*", "sm_segment.*", "vader_segment.*", "ucx_shm_*")
_GIB = 1 << 30
# Counts of 32 bits end here.
_LARGE = (1 << 31) + 8
# Seconds that a rank computes while another one waits for its memory.
_BUSY = 0.3
# Seconds in which a launcher forwards a line.
_FORWARDING = 0.5
# Printed before a rank is killed, as the launcher may end the job then.
KILLS = "a rank is killed now: if no finding follows, this launcher ends the job, with \
its own exit status"


class Finding(NamedTuple):
    """A result: a verdict, what was found, in one line, and what to do about it.

    The advice is a line for the shell, if there is one.
    """

    verdict: str
    text: str
    advice: str = ""


def find_each_other(group: Group) -> Finding:
    """Ranks that are started together and find each other."""
    tasks = number_in(os.environ, "SLURM_STEP_NUM_TASKS")
    tasks = tasks or number_in(os.environ, "SLURM_NTASKS")
    text = f"{group.size} ranks on {counted(len(group.nodes), 'node')}"
    verdict = NOTE
    if group.size == 1:
        text = "only one rank: nothing between ranks is tested"
    elif tasks and tasks != group.size:
        text += f", but SLURM has {tasks} tasks"
    else:
        verdict = GOOD
    names = Counter(group.allgather(MPI.Get_processor_name(), "names of the hosts"))
    vendor, version = MPI.get_vendor()
    where = ", ".join(f"{count} on {name}" for name, count in sorted(names.items())[:4])
    more = f" and {len(names) - 4} more hosts" * (len(names) > 4)
    text += f"; {vendor} {'.'.join(map(str, version))}; ranks: {where}{more}"
    return Finding(verdict, text)


def thread_level(group: Group) -> Finding:
    """MPI calls from several threads, for servers in a thread and between nodes."""
    level = min(group.allgather(MPI.Query_thread(), "levels"))
    if level == MPI.THREAD_MULTIPLE:
        return Finding(GOOD, "MPI_THREAD_MULTIPLE")
    return Finding(
        BAD,
        "less than MPI_THREAD_MULTIPLE: optimizers with a server need dedicated=True, "
        "and groups of several nodes do not work",
        "unset MPI4PY_RC_THREADS MPI4PY_RC_THREAD_LEVEL, or use another MPI library",
    )


def atomic_operations(group: Group) -> Finding:
    """Words that all ranks change at the same time."""
    words, count = words_of(group, 0, 2), 200
    group.allgather(None, "start")
    for _ in range(count):
        words.fetch_add(0, 1)
        seen = words.read(1)
        while (found := words.compare_and_swap(1, seen, seen + 1)) != seen:
            seen = found
    group.allgather(None, "end")
    added, swapped = words.read(0), words.read(1)
    words.free()
    expected = count * group.size
    if added == swapped == expected:
        return Finding(GOOD, f"{2 * expected} atomic operations, none of them lost")
    return Finding(
        BAD,
        f"{added} of {expected} additions and {swapped} of as many swaps were made",
        "Open MPI: export OMPI_MCA_osc=^rdma, or use another MPI library",
    )


def sums_of_writers(group: Group) -> Finding:
    """Gradients that all ranks send to one at the same time."""
    wrong = []
    for storage in ("slots", "sum"):
        with hpc.ConditionalAccumulator(
            "float32", shape=(10_000,), storage=storage, comm=group
        ) as acc:
            for step in range(5):
                acc.apply_grad(np.full(10_000, group.rank + step, np.float32), step)
                if group.rank == 0:
                    mean = acc.take_grad(group.size)
                    exact = (group.size - 1) / 2 + step
                    wrong += [storage] * bool((mean != exact).any())
                group.allgather(None, "round")
    if not wrong:
        return Finding(GOOD, "sums of several writers are exact")
    return Finding(BAD, f"wrong sums with storage {', '.join(sorted(set(wrong)))}")


def sums_of_all(group: Group) -> Finding:
    """Averages over all ranks, in single and half precision."""
    wrong = []
    for dtype in (np.dtype(np.float32), *HALVES):
        with hpc.Reducer(hpc.Layout({"x": (100_003,)}, dtype), group) as reducer:
            reducer.arrays()["x"][...] = group.rank
            mean = np.asarray(reducer.reduce()["x"], np.float64)
            exact = np.asarray((group.size - 1) / 2, dtype).astype(np.float64)
            wrong += [str(dtype)] * bool((mean != exact).any())
    wrong = sorted({name for each in group.allgather(wrong, "sums") for name in each})
    if not wrong:
        return Finding(GOOD, "averages in float32, float16 and bfloat16 are exact")
    return Finding(BAD, f"wrong averages of {', '.join(wrong)}")


def many_windows(group: Group) -> Finding:
    """Objects that are open at the same time, each with a communicator of its own."""
    opened = []
    for number in range(32):
        opened.append(
            hpc.ConditionalAccumulator(
                "float32", shape=(8,), comm=group, name=f"{number}", storage="sum"
            )
        )
    for acc in opened:
        acc.free()
    return Finding(GOOD, f"{len(opened)} accumulators at the same time")


def progress(group: Group) -> Finding:
    """One-sided calls to a rank that computes in Python."""
    words, worst = words_of(group, 0, 1), 0.0
    for _ in range(3):
        group.allgather(None, "start")
        begun = time.monotonic()
        if group.rank == 0:
            while time.monotonic() - begun < _BUSY:
                sum(range(1000))
        else:
            words.fetch_add(0, 1)
            worst = max(worst, time.monotonic() - begun)
    worst = max(group.allgather(worst, "waits"))
    words.free()
    text = f"a rank that computes answers within {worst * 1e3:.1f} ms"
    if worst < _BUSY / 2:
        return Finding(GOOD, text)
    return Finding(
        NOTE,
        f"a rank that computes for {_BUSY * 1e3:.0f} ms answers after "
        f"{worst * 1e3:.0f} ms: others wait for it",
        "use dedicated=True, so that the server has its own rank, or more cores",
    )


def large_messages(group: Group) -> Finding:
    """A message of more than 2 GiB."""
    free = min(group.allgather(free_memory(), "memory"))
    if free < 2 * _LARGE * group.node.size:
        return Finding(NOTE, f"not tested: only {free / _GIB:.1f} GiB are free")
    failed = ""
    try:
        if not _arrives(group):
            failed = "a message of 2 GiB is truncated"
    except MPI.Exception as error:
        failed = f"a message of 2 GiB fails: {error}"
    failed = max(group.allgather(failed, "large message"))
    if not failed:
        return Finding(GOOD, "a message of 2 GiB arrives")
    return Finding(NOTE, f"{failed}; hpcaccum sends at most 1 GiB at once")


def _arrives(group: Group) -> bool:
    """Send a large message from rank 0 to rank 1; return whether its end is there."""
    if group.rank > 1 or group.size == 1:
        return True
    array = np.zeros(_LARGE, np.uint8)
    if group.rank == 0:
        array[-1] = 7
        group.comm.Send(array, 1)
    else:
        group.comm.Recv(array, 0)
    return bool(array[-1] == 7)


def shared_memory(group: Group) -> Finding:
    """The memory in /dev/shm, which holds gradients."""
    shm = os.statvfs(_SHM)
    free, total = shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize
    # `SyncReplicasOptimizer` with Adam needs most: two gradients of each rank, and the
    # parameters, two copies and two slots of them (docs/guarantees.md).
    largest = max(0, free - group.node.size * (1 << 20)) / (2 * group.node.size + 5)
    least = min(group.allgather((largest, total), "shared memory"))
    text = (
        f"{least[1] / _GIB:.1f} GiB in /dev/shm: gradients of up to "
        f"{least[0] / 2**20:.0f} MiB with these ranks on a node"
    )
    if least[0] >= 16 << 20:
        return Finding(GOOD, text)
    return Finding(
        BAD if least[0] < 1 << 20 else NOTE,
        text,
        "mount -o remount,size=50% /dev/shm; in a container: --shm-size=8g",
    )


def left_files(group: Group) -> Finding:
    """What killed ranks have left in /dev/shm."""
    old = [
        path.name for pattern in _LEFT for path in _SHM.glob(pattern) if _is_old(path)
    ]
    names = sorted({name for each in group.allgather(old, "files") for name in each})
    if not names:
        return Finding(GOOD, "no files of killed ranks in /dev/shm")
    return Finding(
        NOTE,
        f"{len(names)} files of earlier ranks in /dev/shm, such as {names[0]}",
        f"if no other job of yours runs there: rm /dev/shm/{names[0]} ...",
    )


def _is_old(path: Path) -> bool:
    """Whether a file is this user's, and was not changed in the last 10 minutes."""
    try:
        state = path.stat()
    except FileNotFoundError:
        # Another job had it, and has ended meanwhile.
        return False
    return state.st_uid == os.getuid() and time.time() - state.st_mtime > 600


def cores(group: Group) -> Finding:
    """The cores that each rank may use, and the threads of its linear algebra."""
    mine = sorted(os.sched_getaffinity(0))
    on_node = group.node.allgather(mine)
    usable = len({core for each in on_node for core in each})
    shared = len(on_node) > usable
    wanted = number_in(os.environ, "OMP_NUM_THREADS") or len(mine)
    facts = group.allgather((shared, len(on_node), usable, wanted), "cores")
    shared, ranks, usable, wanted = max(facts)
    where = f"{counted(ranks, 'rank')} on {counted(usable, 'core')}"
    if shared:
        return Finding(
            NOTE, f"{where}: ranks wait for each other's cores", "use fewer ranks"
        )
    if ranks * wanted > usable:
        return Finding(
            NOTE,
            f"{where}, with {wanted} threads of linear algebra each",
            f"export OMP_NUM_THREADS={max(1, usable // ranks)}",
        )
    return Finding(GOOD, where)


def device_memory(group: Group) -> Finding:
    """Whether MPI takes memory of a CUDA device as it says."""
    try:
        array = cupy().full(1000, group.rank, np.float32)
    except (DeviceUnavailableError, ImportError, RuntimeError) as error:
        return Finding(GOOD, f"none: {_first_line(error)}")
    answer = cuda_awareness()
    if not answer.aware:
        return Finding(NOTE, f"MPI does not accept device memory: {answer.reason}")
    group.comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
    if float(array[0]) == group.size * (group.size - 1) / 2:
        return Finding(GOOD, f"MPI accepts device memory ({answer.reason})")
    return Finding(
        BAD, "MPI adds device memory wrongly", "export HPCACCUM_CUDA_AWARE=0"
    )


def lost_rank(group: Group) -> Finding:
    """A rank that is killed, and others that go on without it."""
    if group.size == 1:
        return Finding(NOTE, "not tested: only one rank")
    with hpc.ConditionalAccumulator("float32", shape=(1,), comm=group) as acc:
        _say(group, KILLS)
        group.allgather(None, "start")
        begun = time.monotonic()
        if group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        acc.apply_grad(np.ones(1))
        if group.rank == 0:
            acc.take_grad(group.size)
        seconds = time.monotonic() - begun
        # See `ends_job_at_output`.
        _say(group, "the others go on")
    text = f"a rank was killed, and the others went on after {seconds:.1f} s"
    return Finding(GOOD, text)


def _say(group: Group, line: str) -> None:
    """Print a line on rank 0."""
    if group.rank == 0:
        print(line, flush=True)
        time.sleep(_FORWARDING)


def to_go_on(vendor: str) -> str:
    """Return with which options a launcher lets a job go on that has lost a rank."""
    if vendor == "Open MPI":
        return "mpiexec --with-ft ulfm -n 4 python train.py"
    return (
        "mpiexec -disable-auto-cleanup -n 4 sh -c 'trap : USR1; \"$@\"; exit $?' sh "
        "python train.py\nsrun --mpi=pmi2 --kill-on-bad-exit=0 --no-kill -n 4 python "
        "train.py"
    )


def _first_line(error: BaseException) -> str:
    """Return what an error says, without its advice."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.partition(";")[0].partition(": pip")[0]


PROBES: dict[str, Callable[[Group], Finding]] = {
    "launch": find_each_other,
    "threads": thread_level,
    "atomics": atomic_operations,
    "writers": sums_of_writers,
    "averages": sums_of_all,
    "windows": many_windows,
    "progress": progress,
    "large": large_messages,
    "memory": shared_memory,
    "left files": left_files,
    "cores": cores,
    "device": device_memory,
    LOSS: lost_rank,
}

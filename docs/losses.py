"""Measure how long updates pause when a rank is killed: python docs/losses.py.

This runs each case several times with the mpiexec of this Python, on 4 ranks, of which
the last one is killed by the one before it. It prints the pauses, and writes the
updates over time of one run of each case to losses.json, from which pictures.py draws:
the run that other programs have disturbed least before the kill. The ranks run this
file, too.

With --hosts, the ranks are on two hosts made of namespaces. This needs root, and
PYTHONPATH=. in the repository.

With --demo, it trains on the digits instead, and kills rank 2 half way.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

import hpcaccum as hpc

HERE = Path(__file__).parent
RANKS = 4
# Seconds of the computation of a gradient; before the kill, at least; and after it.
COMPUTE, BEFORE, AFTER = 0.01, 1.5, 2.5
# The picture has these seconds before and after the kill, and columns of so many ms.
PART, COLUMN_MS = (1, 2), 100
# The demo trains for so many epochs, and kills this rank.
EPOCHS, KILLED = 30, 2
KINDS = ("drop-stale", "sync-replicas, quorum 3", "sync-replicas, quorum 4")
# Options of mpiexec, and what starts each program (failures.md says why).
SURVIVE = {
    "MPICH": (
        ["-disable-auto-cleanup"],
        ["sh", "-c", 'trap : USR1; "$@"; exit $?', "sh"],
    ),
    "Open MPI": (["--with-ft", "ulfm"], []),
}


def train(kind: str, path: str) -> None:
    """Train on all ranks, and write a trace."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    victim = comm.bcast(os.getpid(), root=comm.size - 1)
    # On the same host, which may number its processes by itself.
    kills_it = comm.rank == comm.size - 2
    w = hpc.Variable(np.zeros(1000, np.float32), "w")
    if kind == "drop-stale":
        opt = hpc.DropStaleGradientOptimizer(hpc.SGD(0.0), 2 * comm.size)
    else:
        opt = hpc.SyncReplicasOptimizer(hpc.SGD(0.0), int(kind[-1]))

    def loss() -> tuple[float, list[np.ndarray]]:
        time.sleep(COMPUTE)
        return 0.0, [np.ones(1000, np.float32)]

    opt.initialize([w])
    kills = BEFORE + random.random()
    with hpc.trace(path):
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < BEFORE + 1 + AFTER:
            opt.minimize(loss, var_list=[w])
            if kills_it and passed > kills:
                with hpc.span("kill"):
                    os.kill(victim, signal.SIGKILL)
                kills = float("inf")
        opt.leave()
    opt.free()


def launch(vendor: str) -> list[str]:
    """Return the command that starts a program of Python on all ranks."""
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    options, wrapper = SURVIVE[vendor]
    return [str(mpiexec), *options, "-n", str(RANKS), *wrapper, sys.executable]


def run(kind: str, where: str, vendor: str) -> list[float]:
    """Return when a run made its updates, in seconds since the kill."""
    environment = dict(os.environ, MPIR_CVAR_NOLOCAL=str(int(where == "4 nodes")))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "trace.json"
        program = __file__, "--train", kind, str(path)
        if where == "2 hosts":
            from tests.cluster.hosts import hosts

            (Path(folder) / "hosts").mkdir()
            cluster = stack.enter_context(hosts(Path(folder) / "hosts", 2))
            options, wrapper = SURVIVE[vendor]
            job = *wrapper, sys.executable, *program
            command = cluster.command(2, *job, options=options)
            environment = cluster.environment(environment)
        else:
            command = [*launch(vendor), *program]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        if not path.exists():
            raise RuntimeError(done.stdout)
        events = json.loads(path.read_text())["traceEvents"]
    (kill,) = (event["ts"] for event in events if event["name"] == "kill")
    updates = [e for e in events if e.get("cat") == "UpdateLoop._make"]
    times = sorted((e["ts"] + e["dur"] - kill) / 1e6 for e in updates)
    assert times[-1] > 1, f"no update later than {times[-1]} s after the kill"
    return times


def longest_gap(times: list[float], begin: float, end: float) -> float:
    """Return the longest time without an update that touches a span, in ms."""
    gaps = itertools.pairwise(times)
    return 1000 * max(b - a for a, b in gaps if b > begin and a < end)


def in_columns(times: list[float]) -> list[int]:
    """Return the numbers of updates in each column of the picture."""
    edges = np.arange(-1000 * PART[0], 1000 * PART[1] + 1, COLUMN_MS)
    counts: list[int] = np.histogram(times, edges / 1000)[0].tolist()
    return counts


def show(vendor: str) -> None:
    """Train with drop-stale; kill a rank half way."""
    print(f"\ndrop-stale again; rank {KILLED} is killed half way", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        options = "--strategy", "drop-stale", "--straggler", "3:20", "--log", str(log)
        options += "--epochs", str(EPOCHS)
        job = subprocess.Popen(
            [*launch(vendor), "-m", "hpcaccum", "train", *options],
            stdin=subprocess.DEVNULL,
        )
        while job.poll() is None and epoch_in(log) < EPOCHS / 2:
            time.sleep(0.01)
        for process in processes_of(KILLED, str(log)):
            os.kill(process, signal.SIGKILL)
        job.wait()
        # mpiexec of MPICH returns the status of the rank that was killed.
        if epoch_in(log) < EPOCHS:
            sys.exit("the training did not reach its end")


def epoch_in(log: Path) -> float:
    """Return the epoch that a training has reached."""
    text = log.read_text() if log.exists() else ""
    return max(map(float, re.findall(r'"epoch": ([0-9.]+)[,}]', text)), default=0)


def processes_of(rank: int, word: str) -> list[int]:
    """Return the process of a rank, in whose command a word is."""
    found = []
    launched = {f"{name}={rank}" for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            variables = (process / "environ").read_text(errors="replace").split("\0")
            # Not the shell that has started it.
            if words[0] == sys.executable and word in words and launched & {*variables}:
                found.append(int(process.name))
    return found


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", action="store_true", help="on two hosts; needs root")
    parser.add_argument("--demo", action="store_true", help="kill a rank of a training")
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    from mpi4py.MPI import get_vendor

    vendor = get_vendor()[0]
    if options.demo:
        show(vendor)
        return
    columns = {}
    places = ["one node", "4 nodes"][: 1 + (vendor == "MPICH")]
    for where in ["2 hosts"] if options.hosts else places:
        for kind in KINDS:
            runs = [run(kind, where, vendor) for _ in range(options.runs)]
            pauses = [longest_gap(times, 0, 1) for times in runs]
            usual = [longest_gap([t for t in times if t < 0], -1, 0) for times in runs]
            print(
                f"{vendor}, {where}, {kind}: {statistics.median(pauses):.0f} ms, at "
                f"most {max(pauses):.0f} ms; in the second before "
                f"{statistics.median(usual):.0f} ms, at most {max(usual):.0f} ms",
                flush=True,
            )
            if where == "one node":
                columns[kind] = in_columns(runs[usual.index(min(usual))])
    lines = ",\n".join(f"{json.dumps(k)}: {v}" for k, v in columns.items())
    if columns and vendor == "MPICH":
        (HERE / "losses.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()

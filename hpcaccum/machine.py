"""The machine and the libraries that figures are measured with; its free memory."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hpcaccum
from hpcaccum import Group
from hpcaccum.errors import counted
from hpcaccum.mpi import MPI

# Names of hosts that are shown.
_MOST_HOSTS = 3
# Settings of MPI libraries and of the libraries below them.
_SETTINGS = ("MPIR_CVAR_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "OMP_NUM_THREADS")


def circumstances(group: Group) -> dict[str, Any]:
    """Return the circumstances of this job. Collective."""
    here = MPI.Get_processor_name(), os.sched_getaffinity(0)
    places = group.allgather(here, "names and cores of the hosts")
    vendor, version = MPI.get_vendor()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "ranks": group.size,
        "nodes": len(group.nodes),
        "ranks_per_node": max(map(len, group.nodes)),
        "hosts": dict(Counter(host for host, _ in places)),
        "mpi": vendor,
        "mpi_version": ".".join(map(str, version)),
        "cpu": _processor_name(),
        "cores": os.cpu_count(),
        "oversubscribed": oversubscribed(places),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS)
        },
        "python": platform.python_version(),
        "numpy": np.__version__,
        "hpcaccum": hpcaccum.__version__,
        "commit": _commit() if group.rank == 0 else None,
        "command": ["hpcaccum", *sys.argv[1:]],
    }


def oversubscribed(places: Sequence[tuple[str, set[int]]]) -> dict[str, Any] | None:
    """Return the host whose ranks outnumber its cores the most, and these numbers."""
    ranks = Counter(host for host, _ in places)
    cores: dict[str, set[int]] = {}
    for host, usable in places:
        cores.setdefault(host, set()).update(usable)
    worst = max(ranks, key=lambda host: ranks[host] / len(cores[host]))
    if ranks[worst] <= len(cores[worst]):
        return None
    return {"host": worst, "ranks": ranks[worst], "cores": len(cores[worst])}


def describe(facts: dict[str, Any]) -> str:
    """Return the circumstances in two lines of at most 80 columns, if names allow.

    A third line warns if ranks wait for a core.
    """
    hosts = list(facts["hosts"])
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    if facts["nodes"] > 1:
        where += (
            f", at most {facts['ranks_per_node']} on each of {facts['nodes']} nodes"
        )
    warning = ""
    if (crowd := facts["oversubscribed"]) is not None:
        cores = counted(crowd["cores"], "core")
        warning = (
            f"\nwarning: {crowd['ranks']} ranks share {cores} of {crowd['host']}: the "
            "times include waits for a core"
        )
    return (
        f"{counted(facts['ranks'], 'rank')} on {where}; "
        f"{facts['mpi']} {facts['mpi_version']}\n"
        f"{facts['cpu']}, {facts['cores']} cores; hpcaccum {facts['hpcaccum']}"
        f"{' ' + facts['commit'] if facts['commit'] else ''}"
        f"{warning}"
    )


def _commit() -> str | None:
    """Return the commit, if this program runs from a checkout."""
    root = Path(hpcaccum.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _processor_name() -> str:
    """Return the model of the processor, or its architecture if that is all."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, model = line.partition(":")
        if name.strip() == "model name":
            return " ".join(model.split())
    return platform.processor() or platform.machine()


def hosts_and_date(facts: Mapping[str, Any]) -> str:
    """Return the hosts, the number of nodes and the day of a job, for its pictures."""
    hosts = [*facts["hosts"]] if isinstance(facts.get("hosts"), dict) else ["?"]
    where = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        where += f" and {len(hosts) - _MOST_HOSTS} more"
    nodes = facts.get("nodes", len(hosts))
    day = str(facts.get("date", "?"))[:10]
    return f"{where}; {counted(nodes, 'node')}; {day}"


def free_memory() -> float:
    """Return the number of free bytes."""
    words = Path("/proc/meminfo").read_text().split()
    free = 1024 * float(words[words.index("MemAvailable:") + 1])
    with contextlib.suppress(OSError, ValueError):
        limits = Path("/sys/fs/cgroup")
        limit = float((limits / "memory.max").read_text())
        used = float((limits / "memory.current").read_text())
        words = (limits / "memory.stat").read_text().split()
        # The count includes inactive files, which the kernel evicts when necessary.
        used -= float(words[words.index("inactive_file") + 1])
        free = min(free, limit - used)
    return free

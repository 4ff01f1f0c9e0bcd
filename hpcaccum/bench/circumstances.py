"""The machine, the libraries and the version that figures were measured with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hpcaccum
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum import Group

# Settings of MPI libraries and of the libraries below them.
_SETTINGS = ("MPIR_CVAR_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "OMP_NUM_THREADS")


def circumstances(group: Group) -> dict[str, Any]:
    """Return the circumstances of this job, for all its rows. Collective."""
    names = group.allgather(MPI.Get_processor_name(), "names of the hosts")
    hosts = dict(Counter(names))
    vendor, version = MPI.get_vendor()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "ranks": group.size,
        "nodes": group.comm.allreduce(int(group.node.rank == 0)),
        "ranks_per_node": group.comm.allreduce(group.node.size, MPI.MAX),
        "hosts": hosts,
        "mpi": vendor,
        "mpi_version": ".".join(map(str, version)),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
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


def describe(facts: dict[str, Any]) -> str:
    """Return the circumstances in two lines of at most 80 columns, if names allow."""
    ranks, hosts = facts["ranks"], list(facts["hosts"])
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    if facts["nodes"] > 1:
        where += f", at most {facts['ranks_per_node']} on one of {facts['nodes']} nodes"
    return (
        f"{ranks} rank{'' if ranks == 1 else 's'} on {where}; "
        f"{facts['mpi']} {facts['mpi_version']}\n"
        f"{facts['cpu']}, {facts['cores']} cores; hpcaccum {facts['hpcaccum']}"
        f"{' ' + facts['commit'] if facts['commit'] else ''}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, model = line.partition(":")
        if name.strip() == "model name":
            return " ".join(model.split())
    return platform.processor() or platform.machine()


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

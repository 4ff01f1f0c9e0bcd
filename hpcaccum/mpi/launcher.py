"""The environment in which the launcher of a job starts each rank."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The variables in which launchers give the number of ranks.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")

# The names of processes that start ranks: of MPICH and its relatives, Open MPI 5 and 4,
# SLURM, HPE, and Flux.
_LAUNCHERS = {
    *("hydra_pmi_proxy", "prterun", "prted", "mpiexec", "mpirun", "orterun", "orted"),
    *("slurmstepd", "palsd", "flux-shell"),
}
# Files that a program of Python or MPI has in its memory.
_PROGRAM = re.compile(r"/(lib)?(python|pypy|mpi)[^/\n]*$", re.MULTILINE)

_WRONG_LAUNCHER = """\
{name}={tasks} says that {tasks} ranks were started together, but each is alone in its \
MPI_COMM_WORLD: the launcher and the MPI library ({vendor}) do not know each other
  under SLURM:  srun --mpi={plugin} ...
  elsewhere:    the mpiexec that belongs to {vendor}
  for independent runs on purpose: HPCACCUM_ALLOW_SINGLETONS=1"""


def launched_ranks(env: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks were launched together; 1 if no launcher says so."""
    return max(_sizes(env).values(), default=1)


def is_rank() -> bool:
    """Whether a launcher has started this process, itself or by a script of a shell.

    A program that a rank starts inherits the variables of the launcher, but must not
    call MPI_Init: the launcher would take it for that rank. So there must be no program
    of Python or MPI between this process and a launcher of a known name.
    """
    process = os.getppid()
    while process:
        folder = Path(f"/proc/{process}")
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            # Of another user, if this machine hides those: a daemon, but for the first.
            return process != 1
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name in _LAUNCHERS:
            return True
        with contextlib.suppress(OSError):
            if _PROGRAM.search((folder / "maps").read_text(errors="replace")):
                return False
        process = int(rest.split()[1])
    return False


def launcher_problem(env: Mapping[str, str], size: int, vendor: str) -> str | None:
    """Return what is wrong if the launcher started several worlds of one rank.

    A launcher that does not know the MPI library starts N independent programs of one
    rank, and each of them appears to succeed.
    """
    if size > 1 or env.get("HPCACCUM_ALLOW_SINGLETONS") == "1":
        return None
    sizes = _sizes(env)
    if not sizes or 1 in sizes.values():
        return None
    name, tasks = next(iter(sizes.items()))
    return _WRONG_LAUNCHER.format(
        name=name, tasks=tasks, vendor=vendor, plugin=slurm_plugin(vendor)
    )


def slurm_plugin(vendor: str) -> str:
    """Return what ``srun --mpi=`` needs to start ranks of an MPI library."""
    return "pmix" if vendor == "Open MPI" else "pmi2"


def _sizes(env: Mapping[str, str]) -> dict[str, int]:
    return {name: int(env[name]) for name in _SIZES if env.get(name, "").isdigit()}

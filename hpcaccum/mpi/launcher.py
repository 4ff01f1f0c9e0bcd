"""The environment in which the launcher of a job starts each rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The variables in which launchers give the number of ranks.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")

_WRONG_LAUNCHER = """\
{name}={tasks} says that {tasks} ranks were started together, but each is alone in its \
MPI_COMM_WORLD: the launcher and the MPI library ({vendor}) do not know each other
  under SLURM:  srun --mpi={plugin} ...
  elsewhere:    the mpiexec that belongs to {vendor}
  for independent runs on purpose: HPCACCUM_ALLOW_SINGLETONS=1"""


def launched_ranks(env: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks were launched together; 1 if no launcher says so."""
    return max(_sizes(env).values(), default=1)


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

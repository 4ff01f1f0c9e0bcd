"""The environment in which the launcher of a job starts each rank."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# The variables in which launchers give the number of ranks.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")

# The processes that start ranks, and their variable: of MPICH and its relatives, Open
# MPI 5 and 4, SLURM, HPE, and Flux.
_LAUNCHERS = {
    "hydra_pmi_proxy": "PMI_SIZE",
    **dict.fromkeys(("prterun", "prted"), "OMPI_COMM_WORLD_SIZE"),
    **dict.fromkeys(("mpiexec", "mpirun"), "OMPI_COMM_WORLD_SIZE"),
    **dict.fromkeys(("orterun", "orted"), "OMPI_COMM_WORLD_SIZE"),
    "slurmstepd": "SLURM_STEP_NUM_TASKS",
    "palsd": "PALS_SIZE",
    "flux-shell": "PMI_SIZE",
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
    return _size(env)[1]


def is_rank() -> bool:
    """Whether a launcher has started this process, itself or by a script of a shell.

    A program that a rank starts inherits the variables of the launcher, but must not
    call MPI_Init: the launcher would take it for that rank. So there must be no program
    of Python or MPI between this process and a launcher of a known name.
    """
    return _launcher()[1]


def launcher_problem(env: Mapping[str, str], size: int, vendor: str) -> str | None:
    """Return what is wrong if the launcher started several worlds of one rank.

    A launcher that does not know the MPI library starts N independent programs of one
    rank, and each of them appears to succeed.
    """
    if size > 1 or env.get("HPCACCUM_ALLOW_SINGLETONS") == "1":
        return None
    name, tasks = _size(env)
    if tasks == 1:
        return None
    return _WRONG_LAUNCHER.format(
        name=name, tasks=tasks, vendor=vendor, plugin=slurm_plugin(vendor)
    )


def ends_job_at_output() -> bool:
    """Whether the launcher ends the job when a rank was killed and another one prints.

    Hydra, the mpiexec of MPICH, looks at the end of a process when output of any comes.
    If a signal has killed it, Hydra kills the others, also with the option
    -disable-auto-cleanup. A shell between the two returns a status instead.
    """
    return next(ancestors(), (0, ""))[1] == "hydra_pmi_proxy"


def slurm_plugin(vendor: str) -> str:
    """Return what ``srun --mpi=`` needs to start ranks of an MPI library."""
    return "pmix" if vendor == "Open MPI" else "pmi2"


def number_in(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None if it is not set, or is no number."""
    text = env.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield the number and name of each process above this one, the nearest first.

    The name is empty for one that this machine hides, as it is of another user.
    """
    process = os.getppid()
    while process:
        name, fields = stat(process)
        yield process, name
        process = int(fields[1]) if fields else 0


def stat(process: int) -> tuple[str, list[str]]:
    """Return the name of a process of this node, and the fields after it: its state ...

    Empty if there is no such process, or this machine hides it. Source: proc(5).
    """
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    # "pid (name) state parent ..."; a name may have spaces and parentheses.
    about, _, rest = text.rpartition(")")
    return about.partition("(")[2], rest.split()


def _size(env: Mapping[str, str]) -> tuple[str, int]:
    """Return how many ranks the nearest launcher has started, after its variable."""
    found = {name: number_in(env, name) or 0 for name in _SIZES}
    sizes = {name: size for name, size in found.items() if size}
    if len({*sizes.values()}) > 1:
        # One launcher in a job of another.
        nearest, _ = _launcher()
        if nearest in sizes:
            return nearest, sizes[nearest]
    if len(sizes) > 1:
        # `mpiexec` runs in a step of SLURM.
        sizes.pop("SLURM_STEP_NUM_TASKS", None)
    return max(sizes.items(), key=lambda item: item[1], default=("", 1))


def _launcher() -> tuple[str, bool]:
    """Return the nearest launcher's variable, and whether it started this process."""
    near = True
    for process, name in ancestors():
        if name in _LAUNCHERS:
            return _LAUNCHERS[name], near
        if not name:
            # A daemon, unless it is the first process, which gets orphans.
            return "", near and process != 1
        with contextlib.suppress(OSError):
            files = Path(f"/proc/{process}/maps").read_text(errors="replace")
            near = near and not _PROGRAM.search(files)
    return "", False

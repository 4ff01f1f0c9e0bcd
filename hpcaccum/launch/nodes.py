"""The nodes of a SLURM job that still answer, and a command for fewer of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Seconds in which a node must start a program.
_LIMIT = 60
# Variables of SLURM with a number of the whole job, and with one for each node.
_SIZES = {f"SLURM_{x}" for x in ("NNODES", "JOB_NUM_NODES", "NTASKS", "NPROCS")}
_PER_NODE = {f"SLURM_{x}" for x in ("TASKS_PER_NODE", "JOB_CPUS_PER_NODE")}
# In the options of launchers, their name and their value.
_RANKS = re.compile(r"(?<=\0)((?:-n|-np|--np|--ntasks)[\0=]?)([0-9]+)(?=\0|$)")
_NODES = re.compile(r"(?<=\0)((?:-N|--nodes)[\0=]?)([0-9]+)(?=\0|$)")


def on_nodes_that_answer(words: list[str]) -> list[str]:
    """Return a command for the nodes of this job that answer.

    Also changes the environment, from which mpiexec takes its hosts.
    """
    # SLURM takes a node from the job some time after it went down.
    job = os.environ["SLURM_JOB_ID"]
    size = _output("squeue", "--noheader", f"--jobs={job}", "--format=%D")
    start = f"-N{size}", f"-n{size}", "--ntasks-per-node=1", "--mpi=none"
    # For every srun, also that of mpiexec: the step of a command that has ended may
    # keep its cores until SLURM has noticed that a node is down, or longer.
    os.environ["SLURM_OVERLAP"] = "1"
    survives = "--no-kill", "--kill-on-bad-exit=0"
    answers = _output("srun", *start, *survives, "printenv", "SLURMD_NODENAME").split()
    names = _output("scontrol", "show", "hostnames").split()
    alive = [name for name in names if name in answers]
    if not alive or alive == names:
        return words
    print(f"hpcaccum run: the nodes {', '.join(alive)} answer", file=sys.stderr)
    for name in _SIZES & os.environ.keys():
        os.environ[name] = str(int(os.environ[name]) * len(alive) // len(names))
    for name in _PER_NODE & os.environ.keys():
        os.environ[name] = re.sub("[(,].*", "", os.environ[name]) + f"(x{len(alive)})"
    os.environ["SLURM_NODELIST"] = os.environ["SLURM_JOB_NODELIST"] = ",".join(alive)
    # The options of the launcher end where the program begins.
    program = next((i for i, word in enumerate(words) if i and shutil.which(word)), 1)
    options = "\0".join(words[:program])
    wanted = _NODES.search(options)
    before = int(wanted[2]) if wanted else len(names)
    nodes = min(before, len(alive))
    options = _NODES.sub(rf"\g<1>{nodes}", options)
    options = _RANKS.sub(lambda x: f"{x[1]}{int(x[2]) * nodes // before}", options)
    if Path(words[0]).name == "srun":
        options += f"\0--nodelist={','.join(alive[:nodes])}"
    return [*options.split("\0"), *words[program:]]


def _output(*command: str) -> str:
    """Return what a command prints within the limit of time."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_LIMIT)
        return done.stdout.decode().strip()
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode()

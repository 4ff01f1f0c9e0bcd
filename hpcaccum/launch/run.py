"""``hpcaccum run``: starts a command again that has lost a rank. It needs no MPI."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hpcaccum import InvalidArgumentError, checkpoint
from hpcaccum.errors import RESTART
from hpcaccum.option_values import add, whole

# Each asks the command to end, so it is not started again.
_SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
_SIGNALS += [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
# Statuses after the loss of a rank. MPICH's mpiexec returns 9 if a rank was killed and
# 255 if a host is lost, and combines those of several ranks bit by bit. A rank of Open
# MPI whose connection has ended has status 14.
_LOSSES = {RESTART, 9, 255, 14, *(RESTART | 128 + n for n in range(signal.NSIG))}

# Seconds in which a node must start a program.
_LIMIT = 60
# Variables of SLURM with a number of the whole job, and with one for each node.
_SIZES = {f"SLURM_{x}" for x in ("NNODES", "JOB_NUM_NODES", "NTASKS", "NPROCS")}
_PER_NODE = {f"SLURM_{x}" for x in ("TASKS_PER_NODE", "JOB_CPUS_PER_NODE")}
# In the options of launchers, their name and their value.
_RANKS = re.compile(r"(?<=\0)((?:-n|-np|--np|--ntasks)[\0=]?)([0-9]+)(?=\0|$)")
_NODES = re.compile(r"(?<=\0)((?:-N|--nodes)[\0=]?)([0-9]+)(?=\0|$)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.usage = "%(prog)s [options] -- mpiexec ... python train.py ..."
    text = "how often the command is started again after it has lost a rank, if it has "
    text += "written a checkpoint since its last start (3)"
    add(parser, "--restarts", whole, text, 3)
    text = "where the command writes its checkpoints (its own --save DIR)"
    add(parser, "--checkpoints", Path, text, metavar="DIR")
    text = "a launcher with its program, which continues from its newest checkpoint"
    # Not `command`, which is the subcommand.
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="command", help=text)


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Check the arguments; return what runs the command and returns its status."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise InvalidArgumentError("no command: hpcaccum run [options] -- mpiexec ...")
    if not shutil.which(words[0]):
        raise InvalidArgumentError(f"there is no program {words[0]}")
    saved = re.findall(r"\0--save[=\0]([^\0]+)", "\0".join(words))
    directory = args.checkpoints or (Path(saved[-1]) if saved else None)
    return _Run(words, directory, args.restarts).complete


class _Run:
    def __init__(self, words: list[str], directory: Path | None, restarts: int) -> None:
        self._words, self._directory = words, directory
        self._restart, self._restarts = 0, restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: signal.Signals | None = None

    def complete(self) -> int:
        """Run the command until it ends without a lost rank, or cannot continue."""
        for number in _SIGNALS:
            signal.signal(number, self._forward)
        if "REQUEUE_FILE" in os.environ or self._directory is None:
            return self._start_and_restart()
        # Where a run says that its end was planned. A batch script names its own.
        file = Path(f"{self._directory.absolute()}.requeue")
        os.environ["REQUEUE_FILE"] = str(file)
        file.unlink(missing_ok=True)
        status = self._start_and_restart()
        file.unlink(missing_ok=True)
        return status

    def _start_and_restart(self) -> int:
        before = self._checkpoints()
        status = self._start()
        while _is_loss(status) and self._may_restart(status, before):
            before = self._checkpoints()
            if "SLURM_JOB_ID" in os.environ:
                self._words = on_nodes_that_answer(self._words)
            if self._asked:
                break
            status = self._start()
        return status

    def _start(self) -> int:
        # In a session of its own, as a terminal would send it Ctrl-C in addition.
        self._child = subprocess.Popen(self._words, start_new_session=True)
        if self._asked:
            self._child.send_signal(self._asked)
        status = self._child.wait()
        return status if status >= 0 else 128 - status

    def _forward(self, number: int, _: object) -> None:
        self._asked = signal.Signals(number)
        if self._child:
            self._child.send_signal(number)

    def _checkpoints(self) -> set[Path]:
        if self._directory is None:
            return set()
        # Each model of a run with several shard groups has a folder.
        folders = self._directory, *self._directory.glob("group-*")
        return {file for each in folders for file in checkpoint.files(each)}

    def _may_restart(self, status: int, before: set[Path]) -> bool:
        """Return whether to start the command again; say so, or why not."""
        reason = self._reason_to_end(before)
        self._restart += 1
        end = f"not started again: {reason}"
        if not reason:
            end = f"started again ({self._restart} of {self._restarts})"
        about = f"the command ended with status {status}, as after the loss of a rank"
        print(f"hpcaccum run: {about}; it is {end}", file=sys.stderr, flush=True)
        return not reason

    def _reason_to_end(self, before: set[Path]) -> str:
        if self._asked:
            return f"{self._asked.name} has asked it to stop"
        if _end_was_planned():
            return "it was asked to stop"
        if self._directory is None:
            return "it has no --save DIR, and hpcaccum run no --checkpoints DIR"
        if not self._checkpoints() - before:
            return f"it has written no checkpoint to {self._directory} since its start"
        if self._restart == self._restarts:
            return f"--restarts {self._restarts}"
        return ""


def _is_loss(status: int) -> bool:
    by_signal = 128 < status <= 128 + signal.NSIG and status != 128 + signal.SIGINT
    return by_signal or status in _LOSSES


def _end_was_planned() -> bool:
    """Return whether the command asks for a start in another job."""
    # The file has a word in it if the command has only written a checkpoint.
    file = Path(os.environ.get("REQUEUE_FILE", ""))
    return file.is_file() and not file.read_text()


# The nodes of a SLURM job


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

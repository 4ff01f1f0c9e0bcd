"""The command ``hpcaccum``: which commands there are, and how they end.

Started by mpiexec or srun, the ranks read one command line and should end alike. What
all of them find wrong is said once, by rank 0. An exception on one rank ends the job
with that rank's traceback (`hpcaccum.mpi.install_excepthook`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import hpcaccum
from hpcaccum.bench import command as bench
from hpcaccum.bench import options as bench_options
from hpcaccum.errors import DeviceUnavailableError
from hpcaccum.mpi import MPI, abort_job, install_excepthook
from hpcaccum.train import command as train
from hpcaccum.train import options as train_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Command(NamedTuple):
    """One of the commands.

    Attributes:
        help: One line.
        add_arguments: Tells a parser the options.
        prepare: Collective; checks everything and returns what is then to be done,
            which may return an exit status. A ValueError is raised on all ranks alike,
            and shown as one line.
        needs_mpi: Whether MPI must be loaded for these arguments.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace], Callable[[], int | None]]
    needs_mpi: Callable[[argparse.Namespace], bool] = lambda _: True


COMMANDS = {
    "train": Command(
        "train a network on all ranks, with one way of exchanging gradients or all",
        train_options.add_arguments,
        train.prepare,
    ),
    "bench": Command(
        "measure what exchanging gradients costs here, beside MPI's own calls",
        bench_options.add_arguments,
        bench.prepare,
        bench.needs_mpi,
    ),
}

# What launchers call the number of a rank: MPICH and srun --mpi=pmi2, Open MPI,
# srun --mpi=pmix, HPE, any srun.
_RANKS = (
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)

# Seconds that a rank which ends waits for the others to end too.
_PATIENCE = 3.0
# The exit status of what Ctrl-C ended, as shells have it.
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    Args:
        arguments: The words after ``hpcaccum``; those of this process by default.
    """
    install_excepthook()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _end_interrupted()


def _run(arguments: Sequence[str] | None) -> int:
    args = _parser().parse_args(arguments)
    command = COMMANDS[args.command]
    if command.needs_mpi(args):
        _load_mpi()
    try:
        job = command.prepare(args)
    except (ValueError, DeviceUnavailableError) as error:
        status = 2 if isinstance(error, ValueError) else 1
        _leave(status, f"hpcaccum {args.command}: error: {error}")
    try:
        return job() or 0
    except SystemExit as leaving:
        if leaving.code:
            status = leaving.code if isinstance(leaving.code, int) else 1
            _leave(status, f"hpcaccum {args.command}: ended with {leaving.code}")
    return 0


def _end_interrupted() -> NoReturn:
    """End the job: with one line, by rank 0, if all ranks were interrupted."""
    # Once more would be a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = _launched_rank()
    text = "hpcaccum: interrupted"
    if rank:
        # Rank 0 ends the job, unless it was not interrupted.
        time.sleep(_PATIENCE)
        text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)
    abort_job(_INTERRUPTED)
    # Windows may be open, which MPI_Finalize would wait for.
    os._exit(_INTERRUPTED)


class _Parser(argparse.ArgumentParser):
    """Speaks on one rank only, and does not load MPI to give help."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if _launched_rank() in (None, 0):
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        _leave(2, f"{self.prog}: error: {message}\nsee {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hpcaccum", description=hpcaccum.__doc__)
    parser.add_argument("--version", action="version", version=hpcaccum.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=command.help)
        )
    return parser


def _launched_rank() -> int | None:
    """Return the number that a launcher gave to this process."""
    for name in _RANKS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _load_mpi() -> None:
    """Load MPI, or end: each rank by itself, as none knows of the others."""
    try:
        MPI.COMM_WORLD  # noqa: B018
    except (ImportError, RuntimeError) as error:
        print(f"hpcaccum: error: {error}", file=sys.stderr)
        sys.exit(1)


def _leave(status: int, text: str) -> NoReturn:
    """Say why, once for all ranks, and exit.

    All ranks should come here. Rank 0 speaks, and nobody exits before it has spoken,
    as launchers end a job when the first rank ends badly. A rank that finds itself
    alone speaks for itself and ends the job.
    """
    text = text.rstrip()
    if _launched_rank() is None:
        print(text, file=sys.stderr)
        sys.exit(status)
    _load_mpi()
    rank = MPI.COMM_WORLD.rank
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
    arrival, begun = MPI.COMM_WORLD.Ibarrier(), time.monotonic()
    while not arrival.Test():
        if time.monotonic() - begun > _PATIENCE:
            print(f"rank {rank}: {text}", file=sys.stderr)
            abort_job(status)
        time.sleep(1e-3)
    sys.exit(status)

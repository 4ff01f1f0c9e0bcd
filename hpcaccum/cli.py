"""The command ``hpcaccum``: its subcommands and their exit.

Under mpiexec or srun all ranks read the same command line. Rank 0 prints an error that
all ranks find. An exception on one rank ends the job with that rank's traceback
(`hpcaccum.mpi.install_excepthook`).
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import hpcaccum
from hpcaccum.bench import command as bench
from hpcaccum.bench import options as bench_options
from hpcaccum.errors import DeviceUnavailableError
from hpcaccum.launch import doctor, run, sbatch
from hpcaccum.mpi import MPI, abort_job, install_excepthook, is_rank, number_in
from hpcaccum.plan import command as plan
from hpcaccum.stopping import INTERRUPTED
from hpcaccum.train import command as train
from hpcaccum.train import options as train_options


class Command(NamedTuple):
    """A subcommand, with its ``help`` in one line.

    `prepare` checks the arguments and returns the job, which may return an exit status.
    It is collective, and raises a ValueError on all ranks, printed as one line.
    `needs_mpi` says whether these arguments need MPI.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    prepare: Callable[[argparse.Namespace], Callable[[], int | None]]
    needs_mpi: Callable[[argparse.Namespace], bool] = lambda _: True


# The first line of the package's docstring; the rest is for developers.
_SUMMARY = (hpcaccum.__doc__ or "").partition("\n")[0]

COMMANDS = {
    "train": Command(
        "train a network on all ranks with one strategy of gradient exchange, or all",
        train_options.add_arguments,
        train.prepare,
    ),
    "plan": Command(
        "predict speed, drops and lags of the strategies on more ranks than you have",
        plan.add_arguments,
        plan.prepare,
        lambda _: False,
    ),
    "bench": Command(
        "measure the cost of gradient exchange, compared with MPI's own calls",
        bench_options.add_arguments,
        bench.prepare,
        bench.needs_mpi,
    ),
    "doctor": Command(
        "test how the MPI of this machine behaves, and suggest settings",
        doctor.add_arguments,
        doctor.prepare,
        doctor.needs_mpi,
    ),
    "run": Command(
        "start a command, and start it again from its checkpoint if it loses a rank",
        run.add_arguments,
        run.prepare,
        lambda _: False,
    ),
    "sbatch": Command(
        "write a batch script for SLURM that trains, measures, or runs another program",
        sbatch.add_arguments,
        sbatch.prepare,
        lambda _: False,
    ),
}

# Variables in which launchers pass the rank: MPICH and srun --mpi=pmi2, Open MPI,
# srun --mpi=pmix, HPE, any srun.
_RANKS = (
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)

# Seconds that an exiting rank waits for the others to exit too.
_PATIENCE = 3.0
# The exit status after a write to a pipe that nothing reads.
_UNREAD = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status."""
    install_excepthook()
    _open_streams()
    try:
        status = _run(arguments)
        # Not at the end of the program, which could only report an error.
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _end_interrupted()
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        _leave(1, f"hpcaccum: error: {error.filename or 'output'}: {error.strerror}")


def _open_streams() -> None:
    """Make standard streams usable: Python has None for a closed one (``>&-``)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest number that is free: the next file would get it, and what other
            # libraries print.
            setattr(
                sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "rw"[number > 0])
            )
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # As in errors: a name that a terminal cannot show must not end a training.
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str] | None) -> int:
    args = _parsed(arguments)
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
        if isinstance(leaving.code, int) and leaving.code:
            code = leaving.code
            _leave(code, f"hpcaccum {args.command}: ended with status {code}")
        if leaving.code:
            _leave(1, f"hpcaccum {args.command}: error: {leaving.code}")
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed words; errors name the command, which argparse omits."""
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = parser.prog, args.command, getattr(args, "benchmark", "")
        parser.prog = " ".join(filter(None, words))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _end_interrupted() -> NoReturn:
    """End the job; rank 0 prints one line if all ranks were interrupted."""
    # A second Ctrl-C would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = _launched_rank()
    text = "hpcaccum: interrupted"
    if rank:
        # If rank 0 was interrupted too, it ends the job meanwhile.
        time.sleep(_PATIENCE)
        text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)
    abort_job(INTERRUPTED)
    # MPI_Finalize would wait for open windows.
    os._exit(INTERRUPTED)


def _end_unread() -> NoReturn:
    """End the job, as what reads its output has ended: ``hpcaccum bench | head``."""
    _discard_output()
    if _launched_rank() is not None:
        abort_job(_UNREAD)
    sys.exit(_UNREAD)


def _discard_output() -> None:
    # What is still buffered would raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Prints on one rank only, and shows help without loading MPI."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if _launched_rank() in (None, 0):
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        # The value looks like another option.
        if message == "argument --sbatch: expected one argument":
            message += "; write --sbatch=--partition=long"
        _leave(2, f"{self.prog}: error: {message}\nsee {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hpcaccum", description=_SUMMARY)
    parser.add_argument("--version", action="version", version=hpcaccum.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=command.help)
        )
    return parser


def _launched_rank() -> int | None:
    """Return the rank that a launcher gave to this process, not to its parent."""
    for name in _RANKS if is_rank() else ():
        rank = number_in(os.environ, name)
        if rank is not None:
            return rank
    return None


def _load_mpi() -> None:
    """Load MPI or exit, each rank alone: without MPI it cannot find the others."""
    try:
        MPI.COMM_WORLD  # noqa: B018
    except (ImportError, RuntimeError) as error:
        print(f"hpcaccum: error: {error}", file=sys.stderr)
        sys.exit(1)


def _leave(status: int, text: str) -> NoReturn:
    """Print the reason once for all ranks, and exit. Collective."""
    # Rank 0 prints. No rank exits before that, because launchers kill a job when the
    # first rank fails. A rank that waits in vain for the others aborts the job; if it
    # is another one, it prints for itself.
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
            if rank != 0:
                print(f"rank {rank}: {text}", file=sys.stderr)
            abort_job(status)
        time.sleep(1e-3)
    sys.exit(status)

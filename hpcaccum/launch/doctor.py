"""``hpcaccum doctor``: what the MPI of this machine really does.

Alone, it starts a small job for each probe, so a crash or a hang is a finding as any
other. Started by a launcher, its ranks are the job, and run all probes one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpcaccum import InvalidArgumentError, __version__, group_of
from hpcaccum.errors import counted
from hpcaccum.files import check_writable
from hpcaccum.launch.probes import (
    BAD,
    GOOD,
    KILLS,
    LOSS,
    NOTE,
    PROBES,
    Finding,
    to_go_on,
)
from hpcaccum.mpi import abort_job, launched_ranks, slurm_plugin
from hpcaccum.option_values import add, add_flag, positive

# Seconds: for the start of a job, and for its end when it is asked to.
_START, _PATIENCE = 10.0, 5.0
# Lines of a failed job that are shown; how jobs end, and how if nothing is wrong.
_TAIL = 6
# In lines that may be the cause, which an epilogue of the launcher may follow.
_CAUSE = re.compile("error|fatal|abort|unsupported|running at|exit code", re.IGNORECASE)
_STATUS = "the job ended with status {}"
_SUCCESS = _STATUS.format(0)
_HANGS = "the job did not end"
_LIBRARY = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
_NETWORK = (
    "can all nodes reach each other? If an interface joins only some of them, name "
    "another one. Open MPI: export OMPI_MCA_btl_tcp_if_include=eth0; MPICH with UCX: "
    "export UCX_NET_DEVICES=eth0"
)
_FULL = "is /dev/shm of that node full, or too small? df /dev/shm"
# Printed by each process of pip's Open MPI, when it makes its first window.
_UCX = "OSC UCX component priority"
# What launchers and libraries print, and what helps.
_KNOWN = {
    "not enough slots": "--launcher 'mpiexec --oversubscribe -n 2'",
    "run as root": "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "do not know each other": "the mpiexec of the same MPI; srun --mpi=list",
    "unsupported PMI version": "ranks of MPICH need the mpiexec of MPICH: name it with "
    "--launcher; srun --mpi=pmi2",
    "more processes than": "--launcher 'mpiexec --bind-to none -n 2'",
    # SIGBUS: a page of a file for which there is no memory.
    "Bus error": _FULL,
    "EXIT CODE: 7\n": _FULL,
    # UCX prints the first, Open MPI the second.
    "dest_addr=": _NETWORK,
    "Socket closed": _NETWORK,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    text = (
        "command that starts the small jobs, such as 'srun --mpi=pmix -N 2 -n 4' (in "
    )
    text += "a SLURM job: srun; otherwise mpiexec with 2 ranks)"
    add(parser, "--launcher", str, text, metavar="COMMAND")
    text = "limit for each probe (60); a probe that takes longer is a problem"
    add(parser, "--timeout", positive, text, 60.0, "SECONDS")
    add(parser, "--json", Path, "also write the findings as JSON", metavar="FILE")
    text = "in a job: kill the last rank at the end, to see whether the others go on; "
    text += "the job may end with a status of the launcher (without a job: always)"
    add_flag(parser, "--kill", text)
    # What the small jobs run.
    parser.add_argument("--probe", choices=PROBES, help=argparse.SUPPRESS)


def needs_mpi(args: argparse.Namespace) -> bool:
    """Whether this process is a rank of a job."""
    return args.probe is not None or launched_ranks() > 1


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Check the arguments; return what tries everything, and its exit status."""
    check = functools.partial(check_writable, "--json", args.json)
    if needs_mpi(args):
        group = group_of()
        # Rank 0 writes it.
        group.agree("--json", check if group.rank == 0 else lambda: None, lambda _: {})
        return functools.partial(_run, args)
    check()
    launcher = _launcher() if args.launcher is None else _words(args.launcher)
    return functools.partial(_diagnose, launcher, args)


def _words(launcher: str) -> list[str]:
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise InvalidArgumentError(f"--launcher {launcher}: {error}") from None
    if not words:
        raise InvalidArgumentError("--launcher must name a command")
    return words


def _launcher() -> list[str]:
    """Return what starts two ranks here."""
    slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun")
    if slurm:
        return [slurm, f"--mpi={slurm_plugin(_vendor())}"]
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    mpiexec = shutil.which("mpiexec", path=folders)
    if mpiexec is None:
        raise InvalidArgumentError("no mpiexec in PATH: name one with --launcher")
    return [mpiexec, "-n", "2"]


def _vendor() -> str:
    """Return the name of the MPI library; asks another process, as it may crash."""
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARY], capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


# A job for each probe


def _diagnose(launcher: list[str], args: argparse.Namespace) -> int:
    # An exception ends the job and removes its directory, as with Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(f"hpcaccum {__version__} doctor: {shlex.join(launcher)}", flush=True)
    return _report(_findings(launcher, args.timeout), args.json)


def _findings(launcher: list[str], timeout: float) -> Iterator[tuple[str, Finding]]:
    for name in PROBES:
        finding = _tried(launcher, name, timeout)
        yield name, finding
        if name == "launch" and finding.verdict == BAD:
            return


def _tried(launcher: list[str], name: str, timeout: float) -> Finding:
    """Return what a job of its own found, or how it ended."""
    # All nodes see the directory of a job, but not /tmp.
    parent = "." if os.access(".", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".hpcaccum-doctor-", dir=parent) as folder:
        out = Path(folder).resolve() / "finding.json"
        words = ["-m", "hpcaccum", "doctor", "--probe", name, "--json", str(out)]
        words += ["--timeout", str(timeout)]
        output, ended = _output([*launcher, sys.executable, *words], timeout + _START)
        if out.exists() and (found := out.read_text()):
            [facts] = json.loads(found)
            finding = Finding(facts["verdict"], facts["text"], facts["advice"])
            if ended == _SUCCESS or name == LOSS:
                if name != "windows" or _UCX not in output:
                    return finding
                text = f"{finding.text}; Open MPI prints {_UCX!r} and works without UCX"
                return Finding(NOTE, text, "export OMPI_MCA_osc=^ucx")
            # As in MPI_Finalize.
            ended = f"{finding.text}; afterwards {ended}"
        elif KILLS in output and not ended.startswith(_HANGS):
            text = f"a rank was killed, and {ended}"
            return Finding(NOTE, text, to_go_on(_vendor()))
    advice = next((text for sign, text in _KNOWN.items() if sign in output), "")
    if name == "launch" and not advice and ended.startswith(_HANGS):
        advice = _NETWORK
    elif name == "launch" and not advice:
        library = _vendor() or "none that can be loaded"
        advice = f"the MPI library is {library}: does the launcher belong to it?"
    text = f"{ended}; tried: {_tries(name)}\n{_telling(output)}"
    return Finding(BAD, text.rstrip(), advice)


def _telling(output: str) -> str:
    """Return a few lines of what a job printed: about errors, and the last ones."""
    lines = list(dict.fromkeys(filter(str.strip, output.splitlines())))
    causes = [line for line in lines if _CAUSE.search(line)][: _TAIL // 2]
    shown = {*causes, *lines[len(causes) - _TAIL :]}
    return "\n".join(line for line in lines if line in shown)


def _output(command: list[str], timeout: float) -> tuple[str, str]:
    """Run a command; return its output and how it ended."""
    with tempfile.TemporaryFile() as file:
        try:
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            place = "" if os.sep in command[0] else " in PATH"
            return "", f"no program {command[0]!r}{place}"
        except OSError as error:
            return "", f"cannot be started: {error.strerror}"
        try:
            ended = _STATUS.format(job.wait(timeout))
        except subprocess.TimeoutExpired:
            _end(job)
            ended = f"{_HANGS} within {timeout:g} s"
        except BaseException:
            _end(job)
            raise
        file.seek(0)
        # Open MPI prints zeros, with which grep takes the report for binary.
        return file.read().decode(errors="replace").replace("\0", ""), ended


def _end(job: subprocess.Popen[bytes]) -> None:
    # A launcher that is asked ends its ranks; one that is killed may leave them.
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


# In a job


def _run(args: argparse.Namespace) -> int:
    """Run one probe, or all of them; return the exit status of all."""
    group, names = group_of(), [args.probe]
    if not args.probe:
        names = [name for name in PROBES if name != LOSS or args.kill]

    def findings() -> Iterator[tuple[str, Finding]]:
        for name in names:
            with _limit(name, args.timeout):
                yield name, PROBES[name](group)

    if group.rank == 0:
        print(f"hpcaccum {__version__} doctor", flush=True)
        status = _report(findings(), args.json)
        return 0 if args.probe else status
    for _ in findings():
        pass
    return 0


@contextlib.contextmanager
def _limit(name: str, seconds: float) -> Iterator[None]:
    """End the job if the block takes too long."""

    def end() -> None:
        # The stacks are for a user who runs the probe alone: the doctor shows the end.
        faulthandler.dump_traceback(sys.stderr)
        print(f"{_tries(name)}: did not end within {seconds:g} s", file=sys.stderr)
        abort_job(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tries(name: str) -> str:
    return (PROBES[name].__doc__ or "").partition("\n")[0].rstrip(".")


# The report


def _report(findings: Iterable[tuple[str, Finding]], path: Path | None) -> int:
    """Print each finding when it is there; return the exit status."""
    found = []
    for name, finding in findings:
        found.append((name, finding))
        if path:
            # Each time, as the launcher may end the job when a rank is killed.
            facts = [{"probe": name, **each._asdict()} for name, each in found]
            path.write_text(json.dumps(facts, indent=1) + "\n")
        text = f"{finding.verdict:8} {name:11} {finding.text}"
        advice = f"\n-> {finding.advice}" if finding.advice else ""
        print((text + advice).replace("\n", f"\n{'':21}"), flush=True)
    verdicts = [finding.verdict for _, finding in found]
    good, notes, bad = map(verdicts.count, (GOOD, NOTE, BAD))
    print(f"{good} {GOOD}, {counted(notes, NOTE)}, {counted(bad, BAD)}")
    return 1 if bad else 0

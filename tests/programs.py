"""Programs that tests start: what they write, and how those end that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def start_program(
    command: Sequence[str | Path], **options: Any
) -> subprocess.Popen[str]:
    """Start a command; its stdout has the errors too, in the order they came."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )


def run_program(
    command: Sequence[str | Path],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command that may start others; none of them outlives it."""
    process = start_program(
        command, cwd=cwd, env=(env or dict(os.environ)) | {"PYTHONFAULTHANDLER": "1"}
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        left = _processes_below(process.pid)
        lines = "\n".join(f"  {pid} {line}" for pid, line in left.items())
        pytest.fail(
            f"{' '.join(map(str, command))}\nwas still running after {timeout} s, "
            f"with\n{lines}\nIt wrote:\n{_end(process, left)}"
        )
    return subprocess.CompletedProcess(command, process.returncode, output)


def _end(process: subprocess.Popen[str], below: dict[int, str]) -> str:
    """Let the Python programs below a launcher show their stacks; end all."""
    programs = {pid for pid, line in below.items() if "python" in line.split(" ")[0]}
    launchers = {process.pid, *below} - programs
    # A launcher ends all ranks as soon as it sees that one has ended.
    _send(signal.SIGSTOP, launchers)
    _send(signal.SIGABRT, programs)
    time.sleep(5)
    _send(signal.SIGCONT, launchers)
    # A launcher that is asked ends its ranks; one that is killed may leave them.
    for end in process.terminate, lambda: os.killpg(process.pid, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[0]
        end()
    return process.communicate(timeout=30)[0]


def _send(number: signal.Signals, processes: set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes_below(launcher: int) -> dict[int, str]:
    """Return the commands of all processes below a launcher."""
    parents, commands = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            parents[int(process.name)] = int(after_name[1])
            line = (process / "cmdline").read_text().replace("\0", " ")
            commands[int(process.name)] = line
    below = {launcher}
    while more := {pid for pid in commands if parents[pid] in below} - below:
        below |= more
    return {pid: commands[pid] for pid in below - {launcher}}

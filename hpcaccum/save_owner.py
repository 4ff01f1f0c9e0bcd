"""Which process may save to a directory: the last one that took it.

Two jobs may have one directory of checkpoints: by mistake, or because a job was queued
again while ranks of its earlier run still live. Their checkpoints must not mix. So the
process that begins to save writes its name to the file ``.owner``, and looks at it
before each later save. It stops if another process has taken the directory since.

The file is written under another name and renamed, which is atomic also on network
file systems, where locks are unreliable. What opens it there gets its newest contents.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import time
import uuid
from pathlib import Path

from hpcaccum.errors import CheckpointError

# Of files that are not complete; each has a folder of its own.
UNFINISHED = ".unfinished"
_OWNER = ".owner"
_TIME = "%Y-%m-%d %H:%M:%S"

# Unlike its number, different from that of any process on any host and at any time.
_TOKEN = uuid.uuid4().hex
# The directories that this process has taken.
_taken: set[Path] = set()


def take(directory: Path) -> None:
    """Make this process the owner of a directory, instead of any other.

    Also remove what other processes have not completed: a killed one never will, and
    the `check` of a living one fails.
    """
    # A signal handler or another thread may do so at the same time.
    new = directory / f"{_OWNER}-{uuid.uuid4().hex}"
    try:
        new.write_text(f"{_TOKEN}\n{_describe()}\n")
        new.replace(directory / _OWNER)
    except OSError:
        # As on a full disk.
        new.unlink(missing_ok=True)
        raise
    _taken.add(directory.resolve())
    for path in directory.glob(f"{UNFINISHED}*"):
        if not path.name.startswith(f"{UNFINISHED}-{_TOKEN}"):
            shutil.rmtree(path, ignore_errors=True)


def check(directory: Path) -> None:
    """Take a directory, unless this process has done so before.

    Raises:
        CheckpointError: If another process has taken it since; or if there is something
            else in the place of the file.
    """
    path, token, owner = directory / _OWNER, "", ""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path} is not a file of hpcaccum: remove it")
        token, _, owner = path.read_text(errors="replace").partition("\n")
    if not token or directory.resolve() not in _taken:
        take(directory)
    elif token != _TOKEN:
        since = time.localtime(path.stat().st_mtime)
        raise CheckpointError(
            f"{directory}: another run saves here now "
            f"({', '.join(owner.splitlines())}, since {time.strftime(_TIME, since)}); "
            f"this run stops, to keep the checkpoints of both apart"
        )


def unfinished(directory: Path, number: int) -> Path:
    """Return the folder for an incomplete file of this process, by its number."""
    return directory / f"{UNFINISHED}-{_TOKEN}-{number}"


def _describe() -> str:
    """Return the name of this process, and on another line that of its batch job."""
    lines = [f"process {os.getpid()} on {socket.gethostname()}"]
    if job := os.environ.get("SLURM_JOB_ID"):
        # The scripts of `hpcaccum sbatch` look for this line.
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        lines.append(f"job {job}, restart {restart}")
    return "\n".join(lines)

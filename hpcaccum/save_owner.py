"""Which process may save to a directory: the last one that began to.

Two jobs may have one directory of checkpoints: by mistake, or because a job was queued
again while ranks of its earlier run still live. So that their checkpoints do not mix,
each writes its name to the file ``.owner`` when it begins to save, and reads it before
each later save. Renaming is atomic also on network file systems; locks are unreliable.
"""

import os
import shutil
import socket
import time
import uuid
from pathlib import Path

from hpcaccum.errors import CheckpointError

# Unlike its number, different from that of any process on any host and at any time.
_TOKEN = uuid.uuid4().hex
_taken: set[Path] = set()


def take(directory: Path) -> None:
    """Let this process own a directory; remove what others have left unfinished."""
    name = f"process {os.getpid()} on {socket.gethostname()}"
    if job := os.environ.get("SLURM_JOB_ID"):
        name += f", job {job}"
    # A signal handler or another thread may do so at the same time.
    new = directory / f".owner-{uuid.uuid4().hex}"
    try:
        new.write_text(f"{_TOKEN}\n{name}\n")
        new.replace(directory / ".owner")
    finally:
        new.unlink(missing_ok=True)
    _taken.add(directory.resolve())
    for path in directory.glob(".unfinished-*"):
        if _TOKEN not in path.name:
            shutil.rmtree(path, ignore_errors=True)


def check(directory: Path) -> None:
    """Take a directory for the first time; later, raise if another process has it."""
    path = directory / ".owner"
    if os.path.lexists(path) and not path.is_file():
        raise CheckpointError(f"{path} is not a file of hpcaccum: remove it")
    text = path.read_text(errors="replace") if path.exists() else ""
    token, _, owner = text.partition("\n")
    if not token or directory.resolve() not in _taken:
        take(directory)
    elif token != _TOKEN:
        raise CheckpointError(
            f"{directory}: another run saves here now ({owner.strip()}, since "
            f"{time.ctime(path.stat().st_mtime)}); this one must stop, or their "
            f"checkpoints would mix"
        )


def unfinished(directory: Path, number: int) -> Path:
    """Return the folder for an incomplete file of this process, by its number."""
    return directory / f".unfinished-{_TOKEN}-{number}"

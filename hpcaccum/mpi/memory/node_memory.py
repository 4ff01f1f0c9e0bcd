"""Memory that the ranks of a node share by plain loads and stores, without MPI.

It is one file in /dev/shm that all of them map, not an MPI window, for three reasons:

- A NumPy view keeps the mapping, and so the memory, alive. A view of a window that was
  freed is a segmentation fault.
- All pages are allocated at construction, so that too little memory is an error. MPICH
  allocates a window without a check, and the first touch is a SIGBUS.
- It needs no communicator, of which MPICH has 2,048.

The first rank creates it with a name that nobody can guess, and tells the others. It is
unlinked when all have opened it, and gets its pages after that. So a rank that is
killed leaves an empty file, ``hpcaccum-<uid>-<pid of the first rank>-<random>``, or
none. Another user of the node can neither open it nor have made it: each rank checks
its owner and its mode.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi.job.shutdown import count_open
from hpcaccum.mpi.talk.group import Group

_SHM = "/dev/shm"
# Bytes left free for each rank: MPI has mapped memory in /dev/shm that it has not
# touched yet, and makes small windows without a check.
_MARGIN = 1 << 20
# Bytes allocated by one system call, in some 30 us. Small beside the margin, as each
# rank may take so much of it at the same time. And a call that a signal interrupts is
# restarted from the beginning; a profiler may send many signals.
_PIECE = 1 << 18
_WHAT = "allocating shared memory"
_OPEN = os.O_RDWR | os.O_NOFOLLOW
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
_ONE_FOLDER = f"the ranks of a node must share one {_SHM} (containers: --ipc=host)"


class NodeMemory:
    """A part for each rank, and a common part, for ranks of one node. Collective.

    All bytes are 0 at first. Parts begin on a page. `AtomicWords` order the stores of a
    rank with the loads of other ranks. If the node has too little memory, or a rank
    cannot map it, every rank raises an error.

    Args:
        group: Ranks of one node.
        sizes: Bytes of each rank's part; the same list on all ranks.
        common: Bytes of the common part.
        stripes: The bytes of the common part that this rank works on. Those of all
            ranks together cover it. Each rank allocates its part and its stripes, which
            places their pages on its socket.
    """

    def __init__(
        self,
        group: Group,
        sizes: Sequence[int],
        common: int = 0,
        stripes: Iterable[slice] = (),
    ) -> None:
        begins, end = [], 0
        for size in (*sizes, common):
            begins.append(end)
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        last, rank = begins.pop(), group.rank
        mine = [slice(begins[rank], begins[rank] + sizes[rank])]
        mine += [slice(last + each.start, last + each.stop) for each in stripes]
        whole = _map(group, max(end, mmap.PAGESIZE), mine)
        places = zip(begins, sizes, strict=True)
        self.parts: list[Array] = [whole[at : at + size] for at, size in places]
        self.common: Array = whole[last : last + common]

    def free(self) -> None:
        """Drop the memory, which lives as long as views of it. Not collective."""
        self.parts, self.common = [], np.empty(0, np.uint8)


def memory_of_rank(group: Group, rank: int, nbytes: int) -> Array:
    """Return bytes of one rank as `NodeMemory` has them, mapped by all. Collective."""
    sizes = [nbytes * (each == rank) for each in range(group.size)]
    return NodeMemory(group, sizes).parts[rank]


def _map(group: Group, nbytes: int, mine: Iterable[slice]) -> Array:
    """Return new memory as bytes; this rank allocates its pieces. Collective."""
    mapped: list[mmap.mmap] = []

    def allocate() -> None:
        for piece in mine:
            for begin, size in pieces(piece.start, piece.stop, group.size):
                os.posix_fallocate(file, begin, size)
        mapped.append(_mmap(file, nbytes))

    with _opened(group, nbytes) as file:
        _together(group, nbytes, allocate)
    return np.frombuffer(mapped[0], np.uint8)


def _mmap(file: int, nbytes: int) -> mmap.mmap:
    # Since Python 3.13 the mapping needs no open descriptor.
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, nbytes, trackfd=False)
    return mmap.mmap(file, nbytes)


@contextlib.contextmanager
def _opened(group: Group, nbytes: int) -> Iterator[int]:
    """Yield the descriptor of a new file that all ranks have opened. Collective."""
    # Nobody may know it before the file exists.
    name = f"hpcaccum-{os.getuid()}-{os.getpid()}-{os.urandom(16).hex()}"
    path, files = f"{_SHM}/{name}", list[int]()

    def create() -> tuple[str, tuple[int, ...]] | None:
        if group.rank > 0:
            return None
        check_room(nbytes, group.size)
        files.append(os.open(path, _CREATE, 0o600))
        os.ftruncate(files[0], nbytes)
        return path, _checked(path, files[0])

    def join() -> None:
        if group.rank > 0:
            files.append(os.open(theirs, _OPEN))
        if _checked(theirs, files[0]) != state:
            raise OSError(errno.ESTALE, "not the file that the first rank made", theirs)

    try:
        try:
            theirs, state = _together(group, nbytes, create)[0]
            _together(group, nbytes, join)
        finally:
            if group.rank == 0 and files:
                Path(path).unlink(missing_ok=True)
        yield files[0]
    finally:
        for file in files:
            os.close(file)


def _checked(path: str, file: int) -> tuple[int, ...]:
    """Return the device, inode and size of a file, which must be private."""
    state = os.fstat(file)
    if (state.st_uid, state.st_mode) != (os.geteuid(), stat.S_IFREG | 0o600):
        raise OSError(
            errno.EPERM,
            f"its owner is user {state.st_uid} and its mode {state.st_mode:#o}, not "
            f"user {os.geteuid()} and {stat.S_IFREG | 0o600:#o}",
            path,
        )
    return state.st_dev, state.st_ino, state.st_size


def _together(group: Group, nbytes: int, step: Callable[[], Any]) -> list[Any]:
    """Return the results of a step on all ranks, or raise on all. Collective."""
    value, failure = None, None
    try:
        value = step()
    except OSError as error:
        failure = explained(error, nbytes)
    except InvalidArgumentError as error:
        failure = error
    return group.raise_together(_WHAT, failure, value)


def explained(error: OSError, nbytes: int) -> Exception:
    """Return an error that explains why memory could not be allocated."""
    # A system call that cannot write to a page returns EFAULT.
    if error.errno in (errno.ENOSPC, errno.EFAULT):
        return no_room(nbytes, "which another process has taken meanwhile")
    reason = f"cannot share {nbytes} bytes in {_SHM}: {error}"
    if error.errno == errno.ENOENT:
        reason += f"; {_ONE_FOLDER}"
    if error.errno == errno.EEXIST:
        reason += "; this job has not made it"
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        # Files (ulimit -n), address space (ulimit -v), mappings (vm.max_map_count).
        reason += f"; {count_open()} objects of hpcaccum are open on this rank"
    return RuntimeError(reason)


def no_room(nbytes: int, why: str) -> InvalidArgumentError:
    """Return the error for a node with too little shared memory."""
    return InvalidArgumentError(
        f"this node needs {nbytes / 2**20:.1f} MiB of {_SHM}, {why} "
        f"(containers: --shm-size)"
    )


def check_room(nbytes: int, ranks: int) -> None:
    """Raise unless this node has enough memory for its ranks, and some is left."""
    wanted, free = nbytes + ranks * _MARGIN, _free()
    if wanted > free:
        raise no_room(wanted, f"{free / 2**20:.1f} MiB are free")


def pieces(begin: int, end: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield begin and size of the pieces to allocate, while enough memory stays free.

    If no memory were free, even for a moment, MPI could not report the error. Raises
    OSError if there is too little; others may have taken it since `check_room`.
    """
    for start in range(begin, end, _PIECE):
        size = min(_PIECE, end - start)
        if _free() < size + ranks * _MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield start, size


def _free() -> float:
    """Return the free bytes of shared memory; infinity without a limit."""
    try:
        state = os.statvfs(_SHM)
    except FileNotFoundError:
        return math.inf
    return state.f_bavail * state.f_frsize if state.f_blocks else math.inf

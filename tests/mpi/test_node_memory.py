"""NodeMemory: parts of all ranks of a node, and one that they have in common."""

import contextlib
import errno
import os
import struct
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

import hpcaccum as hpc
from hpcaccum.mpi.memory import node_memory as module
from hpcaccum.mpi.memory.node_memory import NodeMemory, check_room

from .acting import meet, until

HUGE = 2**50


@pytest.fixture
def node(one_node):
    return one_node


@pytest.fixture
def descriptors():
    """Check that no file stays open, and that none has a name."""

    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    yield
    meet()
    mine = f"hpcaccum-{os.getuid()}-{os.getpid()}-*"
    assert not list(Path("/dev/shm").glob(mine))
    # Not equal: what earlier tests have left may close some at any time. A heartbeat
    # has one open for a moment.
    until(lambda: count() <= before)


@pytest.mark.parametrize(
    ("nbytes", "common"), [(0, 0), (0, 8), (1, 4096), (100, 0), (5000, 5000)]
)
def test_memory_is_zero_and_shared(node, descriptors, rank, size, nbytes, common):
    sizes = [nbytes + other for other in range(size)]
    memory = NodeMemory(node, sizes, common, [slice(0, common)] if rank == 0 else [])
    assert [part.size for part in memory.parts] == sizes
    assert memory.common.size == common
    assert not any(part.any() for part in (*memory.parts, memory.common))
    meet()
    memory.parts[rank][:] = rank + 1
    memory.common[rank::size] = rank + 1
    meet()
    for other, part in enumerate(memory.parts):
        assert (part == other + 1).all()
    for other in range(size):
        assert (memory.common[other::size] == other + 1).all()
    meet()
    memory.free()
    assert memory.parts == []
    assert memory.common.size == 0


@pytest.mark.parametrize("which", ["first", "last", "common"])
def test_memory_without_room_is_refused_on_every_rank(node, descriptors, size, which):
    sizes = [8] * size
    if which != "common":
        sizes[0 if which == "first" else -1] = HUGE

    with pytest.raises(
        hpc.InvalidArgumentError, match=r"needs .* MiB of /dev/shm, .* --shm-size"
    ):
        NodeMemory(node, sizes, HUGE if which == "common" else 8, [slice(0, 8)])


def fails(code):
    return Mock(side_effect=OSError(code, os.strerror(code)))


# What fails, why, and the error.
BROKEN = [
    ("os.posix_fallocate", errno.ENOSPC, hpc.InvalidArgumentError, "--shm-size"),
    ("os.posix_fallocate", errno.EFBIG, RuntimeError, r"cannot share \d+ bytes"),
    ("_mmap", errno.EMFILE, RuntimeError, "open files.* objects of hpcaccum are open"),
    ("os.open", errno.EIO, RuntimeError, "cannot share"),
    ("os.ftruncate", errno.EIO, RuntimeError, "cannot share"),
    ("os.fstat", errno.EIO, RuntimeError, "cannot share"),
]


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize(("name", "code", "error", "text"), BROKEN)
def test_what_fails_on_one_rank_fails_on_all(
    node, descriptors, rank, size, monkeypatch, which, name, code, error, text
):
    # Only the first rank sets the length.
    odd = 0 if which == "first" or "truncate" in name else size - 1
    if rank == odd:
        *where, attribute = name.split(".")
        monkeypatch.setattr(module.os if where else module, attribute, fails(code))
    with pytest.raises(error, match=text):
        NodeMemory(node, [100] * size)


@pytest.mark.ranks(min=2)
def test_a_rank_with_another_dev_shm_fails_all(node, descriptors, rank, monkeypatch):
    if rank == 1:
        monkeypatch.setattr(module.os, "open", fails(errno.ENOENT))
    with pytest.raises(RuntimeError, match=r"one /dev/shm \(containers"):
        NodeMemory(node, [100] * node.size)


def test_something_is_left_for_mpi(monkeypatch):
    state = os.statvfs("/dev/shm")
    free = state.f_bavail * state.f_frsize
    monkeypatch.setattr(module.os, "statvfs", lambda _: state)
    most = free - 2 * module._MARGIN

    check_room(most, 2)
    with pytest.raises(hpc.InvalidArgumentError, match=r"MiB are free"):
        check_room(most + 1, 2)


@pytest.mark.parametrize("rank_that_sees", ["first", "last"])
def test_room_that_others_take_meanwhile_is_missed_in_time(
    node, descriptors, rank, size, monkeypatch, rank_that_sees
):
    if rank == (0 if rank_that_sees == "first" else size - 1):
        # What is free when rank 0 looks, and before each piece.
        enough, little = 2**40, module._PIECE + size * module._MARGIN
        frees = iter([enough, enough, little, little - 1][rank != 0 :])
        monkeypatch.setattr(module, "_free", lambda: next(frees, 0))
    with pytest.raises(hpc.InvalidArgumentError, match="another process has taken"):
        NodeMemory(node, [4 * module._PIECE] * size)


@pytest.fixture
def opened(monkeypatch):
    """The paths that this rank opens in /dev/shm; with what it does before that."""
    real, paths = os.open, []

    class Opened:
        before = staticmethod(lambda path: None)

    def watched(path, flags, *mode):
        if str(path).startswith(module._SHM):
            Opened.before(path)
            paths.append((path, flags & (os.O_CREAT | os.O_EXCL)))
        return real(path, flags, *mode)

    monkeypatch.setattr(module.os, "open", watched)
    Opened.paths = paths
    return Opened


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_in_the_way_is_an_error_and_stays(
    node, descriptors, rank, size, monkeypatch, kind
):
    monkeypatch.setattr(module.os, "urandom", lambda nbytes: b"guessed")
    secret = b"guessed".hex()
    path = Path(f"/dev/shm/hpcaccum-{os.getuid()}-{os.getpid()}-{secret}")
    if rank == 0 and kind == "link":
        path.symlink_to("/dev/null")
    elif rank == 0:
        path.touch() if kind == "file" else path.mkdir()
    with pytest.raises(RuntimeError, match=r"File exists: '/dev/shm/hp.*not made it"):
        NodeMemory(node, [8] * size)
    if rank == 0:
        path.rmdir() if kind == "folder" else path.unlink()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ["mode", "owner", "link", "other", "longer"])
def test_a_file_that_has_changed_is_an_error(
    node, descriptors, opened, rank, size, kind
):
    if kind == "owner" and os.geteuid() != 0:
        pytest.skip("only root can change the owner")

    def change(path):
        opened.before, other = lambda path: None, Path(f"{path}-other")
        if kind == "mode":
            Path(path).chmod(0o640)
        elif kind == "owner":
            os.chown(path, 61001, -1)
        elif kind == "longer":
            os.truncate(path, 1 << 20)
        else:
            # At once: other ranks open it meanwhile.
            other.symlink_to("/dev/null") if kind == "link" else other.touch(0o600)
            other.rename(path)

    if rank == 1:
        opened.before = change
    text = {
        "mode": "its owner is user .* and its mode 0o100640, not",
        "owner": "its owner is user 61001 and its mode",
        "link": "symbolic links",
    }.get(kind, "not the file that the first rank made")
    with pytest.raises(RuntimeError, match=f"cannot share .*{text}.*'/dev/shm/hp"):
        NodeMemory(node, [8] * size)


@pytest.mark.parametrize("rights", ["all", "list"])
def test_the_file_is_private(node, rank, size, monkeypatch, rights):
    modes, checked = [], module._checked

    def watched(path, file):
        modes.append(os.fstat(file).st_mode & 0o777)
        return checked(path, file)

    monkeypatch.setattr(module, "_checked", watched)
    [folder, *_] = meet(tempfile.mkdtemp(dir="/dev/shm") if rank == 0 else None)
    if rights == "list":
        # For all new files: everything for everybody, and for a user by number.
        entries = [(1, 7, -1), (2, 7, 61002), (4, 7, -1), (16, 7, -1), (32, 7, -1)]
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *e) for e in entries)
        with contextlib.suppress(OSError):
            os.setxattr(folder, "system.posix_acl_default", acl)
    monkeypatch.setattr(module, "_SHM", folder)
    before = os.umask(0)
    try:
        NodeMemory(node, [8] * size).free()
    finally:
        os.umask(before)
    # With a list, the bits of the group are the most that others have by it.
    assert set(modes) == {0o600}
    meet()
    if rank == 0:
        Path(folder).rmdir()

"""NodeMemory: parts of all ranks of a node, and one that they have in common."""

from __future__ import annotations

import pytest

import hpcaccum as hpc
from hpcaccum.group import Group
from hpcaccum.window import NodeMemory

from .acting import meet
from .support import WAIT


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))


@pytest.fixture
def node(comm):
    group = Group.of(comm)
    if not group.single_node:
        pytest.skip("the ranks do not share memory")
    return group


@pytest.mark.parametrize("nbytes", [0, 1, 64, 100, 5000])
@pytest.mark.parametrize("common", [0, 8, 4096, 5000])
def test_memory_is_in_whole_lines_and_shared(node, rank, size, nbytes, common):
    memory = NodeMemory(node, nbytes, common)
    assert len(memory.parts) == size
    assert {part.size for part in memory.parts} == {max(64, -(-nbytes // 64) * 64)}
    assert memory.common.size == common
    meet()
    memory.parts[rank][:] = rank + 1
    memory.common[rank::size] = rank + 1
    memory.sync()
    meet()
    memory.sync()
    for other, part in enumerate(memory.parts):
        assert (part == other + 1).all()
    for other in range(size):
        assert (memory.common[other::size] == other + 1).all()
    meet()
    memory.free()
    assert memory.parts == []
    assert memory.common.size == 0


def test_parts_begin_on_cache_lines(node):
    memory = NodeMemory(node, 100, 100)
    # Open MPI begins a window on a line of its own; nothing is said of it in MPI.
    addresses = [part.ctypes.data % 8 for part in (*memory.parts, memory.common)]
    memory.free()

    assert addresses == [0] * len(addresses)


@pytest.mark.parametrize("which", ["first", "last"])
def test_memory_without_room_is_refused_on_every_rank(node, rank, size, which):
    nbytes = 2**50 if rank == (0 if which == "first" else size - 1) else 8

    with pytest.raises(hpc.InvalidArgumentError, match="/dev/shm"):
        NodeMemory(node, nbytes, 0)


def test_a_common_part_without_room_is_refused_on_every_rank(node):
    with pytest.raises(hpc.InvalidArgumentError, match="/dev/shm"):
        NodeMemory(node, 8, 2**50)

"""The probes of ``hpcaccum doctor``, on a machine without faults and with planted ones.

The message of 2 GiB, and the loss of a rank, are tried in tests/system.
"""

import os

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import group_of
from hpcaccum.launch import probes
from hpcaccum.launch.probes import BAD, GOOD, LOSS, NOTE, PROBES
from hpcaccum.nodes import words_of

from .support import meet

pytestmark = pytest.mark.any_size

QUICK = [name for name in PROBES if name not in ("large", LOSS)]


@pytest.fixture
def group(comm):
    return group_of(comm)


@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_wrong_here(group, name):
    finding = PROBES[name](group)

    # Notes are about this machine: few cores, a rank that is alone.
    assert finding.verdict in (GOOD, NOTE)
    assert finding.text
    assert PROBES[name].__doc__


@pytest.mark.ranks(min=2)
def test_lost_atomic_operations_are_found(group, rank, monkeypatch):
    words = words_of(group, 0, 1)
    # Words of another node have another class.
    kind, fetch_add = type(words), type(words).fetch_add
    words.free()
    if rank == 1:
        monkeypatch.setattr(kind, "fetch_add", lambda *args: fetch_add(*args[:2], 0))
    finding = probes.atomic_operations(group)

    assert finding.verdict == BAD
    added = 200 * (group.size - 1)
    assert f"{added} of {200 * group.size} additions and" in finding.text


def test_wrong_sums_of_writers_are_found(group, rank, monkeypatch):
    take = hpc.ConditionalAccumulator.take_grad

    def wrong(self, *args):
        return take(self, *args) + 1

    monkeypatch.setattr(hpc.ConditionalAccumulator, "take_grad", wrong)
    finding = probes.sums_of_writers(group)

    if rank == 0:
        assert finding == (BAD, "wrong sums with storage slots, sum", "")


def test_wrong_averages_on_any_rank_are_found(group, rank, size, monkeypatch):
    reduce = hpc.Reducer.reduce

    def wrong(self, *args):
        means = dict(reduce(self, *args))
        if rank == size - 1:
            means["x"] = np.asarray(means["x"], np.float64) + 1
        return means

    monkeypatch.setattr(hpc.Reducer, "reduce", wrong)
    finding = probes.sums_of_all(group)

    assert finding.text == "wrong averages of bfloat16, float16, float32"


def test_a_rank_with_fewer_threads_is_found(group, rank, monkeypatch):
    level = probes.MPI.THREAD_SERIALIZED if rank == 0 else probes.MPI.THREAD_MULTIPLE
    monkeypatch.setattr(probes.MPI, "Query_thread", lambda: level)
    finding = probes.thread_level(group)

    assert finding.verdict == BAD
    assert "MPI4PY_RC_THREAD_LEVEL" in finding.advice


@pytest.mark.ranks(min=2)
def test_threads_of_linear_algebra_are_counted(group, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    finding = probes.cores(group)

    ranks = group.node.size
    if ranks > 1:
        assert finding.verdict == NOTE
    assert finding.text.startswith(f"{ranks} rank")


def test_little_shared_memory_is_found(group, monkeypatch):
    statvfs = os.statvfs

    def small(path):
        found = list(statvfs(path))
        # Blocks: their size, how many there are, how many are free.
        found[1], found[2], found[4] = 4096, 1 << 14, (group.size + 1) << 8
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    finding = probes.shared_memory(group)

    assert finding.verdict == BAD
    assert "0.1 GiB in /dev/shm: gradients of up to" in finding.text
    assert "--shm-size=8g" in finding.advice


def test_files_of_killed_ranks_are_found(group, rank, monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "_SHM", tmp_path)
    if rank == 0:
        old = tmp_path / "mpich_shm_1"
        old.touch()
        (tmp_path / "mpich_shm_new").touch()
        os.utime(old, (0, 0))
        # As a file of another job that ends while they are looked at.
        (tmp_path / "mpich_shm_gone").symlink_to("nowhere")
    meet()
    finding = probes.left_files(group)

    assert finding.verdict == NOTE
    assert finding.text.startswith("1 files of earlier ranks")
    assert "mpich_shm_1" in finding.text


def test_slurm_that_started_more_tasks_is_noted(group, size, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(size + 1))
    finding = probes.find_each_other(group)

    assert finding.verdict == NOTE
    if size > 1:
        assert f"but SLURM has {size + 1} tasks" in finding.text

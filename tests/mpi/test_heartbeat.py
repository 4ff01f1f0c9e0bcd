"""The heartbeat: ranks that send nothing, or whose process has ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import Objects, group_of
from hpcaccum.mpi.job import process
from hpcaccum.mpi.life import heartbeat

from .acting import meet, until

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.own_comm]


@pytest.fixture(name="ended")
def not_ended(monkeypatch) -> list[str]:
    """Reasons for which the heartbeat would have ended the job."""
    texts: list[str] = []
    monkeypatch.setattr(heartbeat, "abort_because", texts.append)
    monkeypatch.setattr(heartbeat, "_GRACE", 0.0)
    monkeypatch.setattr(heartbeat, "_LOOK", 0.05)
    monkeypatch.setattr(heartbeat, "_MESSAGES", 600)
    monkeypatch.setenv("HPCACCUM_HEARTBEAT", "30")
    monkeypatch.setenv("HPCACCUM_ON_LOSS", "abort")
    # The ranks that are lost here live, and must be able to free what they share.
    monkeypatch.setattr(heartbeat.Heartbeat, "_note_lost", lambda *_: None)
    return texts


@pytest.fixture(name="heart")
def running(comm, ended) -> Iterator[heartbeat.Heartbeat]:
    """The heartbeat of an accumulator, when each rank has heard of its peers."""
    with hpc.ConditionalAccumulator("f4", (2,), comm=comm):
        heart = Objects.of(group_of(comm))._heartbeat
        assert heart is not None
        peers = heart._peers.values()
        until(lambda: all(peer.place != "the start" for peer in peers))
        meet()
        yield heart
        meet()


def age(heart: heartbeat.Heartbeat, rank: int, seconds: float) -> None:
    """Make the last message of a rank older, and look."""
    with heart._lock:
        heart._peers[rank].seen -= seconds
        heart._check(time.monotonic())


@pytest.mark.parametrize("by", ["the first", "the others"])
def test_missing_ranks_and_their_place_are_named(heart, ended, rank, size, by):
    # Rank 0 hears of all others, which hear of rank 0.
    if (rank == 0) != (by == "the first"):
        assert not ended
        return
    missing = size - 1 if rank == 0 else 0
    age(heart, missing, 31)
    [text] = ended
    assert re.fullmatch(
        rf"rank {missing} \(process \d+ on \S+, last seen 31.* s ago: "
        r"(computing or in MPI|waiting in .+)\) is lost: no heartbeat for 30 s "
        r"\(HPCACCUM_HEARTBEAT sets the limit\)",
        text,
    )


@pytest.mark.parametrize("place", [0, -1])
def test_a_process_that_has_ended_is_found_at_once(heart, ended, rank, size, place):
    dead, first = place % size, 1 if place == 0 else 0
    with heart._lock:
        gone = heart._processes[dead]._replace(started="another time")
        heart._processes[dead] = gone
    if rank == first:
        until(lambda: ended)
        assert ended[0].startswith(f"rank {dead} (process {gone.number} on {gone.host}")
        assert ended[0].endswith("is lost: its process has ended without MPI_Finalize")
    meet()
    if rank not in (first, dead):
        assert not ended


def test_a_late_rank_is_a_warning(heart, ended, rank, size, caplog):
    if rank == 0:
        age(heart, size - 1, 16)
        said = f"no heartbeat for 15 s from rank {size - 1} (process "
        assert said in caplog.text
        until(lambda: " has resumed" in caplog.text)
        assert f"heartbeat of rank {size - 1} (process" in caplog.text
        age(heart, size - 1, 16)
        assert caplog.text.count(said) == 2
    assert not ended


def test_time_in_which_this_process_did_not_run_does_not_count(heart, ended, rank):
    for peer in heart._peers:
        with heart._lock:
            heart._peers[peer].seen -= 31
            heart.forgive(31)
            heart._check(time.monotonic())
    assert not ended


def test_place_is_the_step_and_the_wait(comm, size):
    w = hpc.Variable(np.zeros(2), "w")
    with hpc.SyncReplicasOptimizer(hpc.SGD(1.0), size, comm=comm) as opt:
        for _ in range(3):
            opt.minimize(lambda: (0.0, [np.ones(2)]), var_list=[w])
        place = Objects.of(group_of(comm))._place()
        # The last pull of a rank may be that of the update before.
        assert re.fullmatch(r"step [23] of sync_replicas, computing or in MPI", place)
    with hpc.Reducer(hpc.Layout({"x": (2,)}, "f4"), comm) as reducer:
        reducer.reduce()
        assert Objects.of(group_of(comm))._place().startswith("call 1 of ")
        places = []

        def ready():
            places.append(Objects.of(group_of(comm))._place())
            return len(places) == 2 or None

        Deadline(None, "some call").wait(ready, lambda: "nothing")
        assert places[1].endswith(", waiting in some call")
        assert Objects.of(group_of(comm))._place().endswith(", computing or in MPI")


def test_it_runs_as_long_as_there_are_objects(comm):
    before = [thread.name for thread in threading.enumerate()]
    first = hpc.ConditionalAccumulator("f4", (2,), comm=comm)
    second = hpc.ConditionalAccumulator("f4", (2,), comm=comm)
    heart = Objects.of(group_of(comm))._heartbeat
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("heartbeat") == before.count("heartbeat") + 1
    first.free()
    assert Objects.of(group_of(comm))._heartbeat is heart
    second.free()

    assert Objects.of(group_of(comm))._heartbeat is None
    assert threading.active_count() == len(before)


def test_without_threads_in_mpi_it_sends_nothing(comm, ended, rank, monkeypatch):
    if comm.Split_type(MPI.COMM_TYPE_SHARED).size < comm.size:
        pytest.skip("agents of nodes need these threads")
    # On one rank only: it could not answer the others.
    if rank == 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
        monkeypatch.setattr(process.MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with hpc.ConditionalAccumulator("f4", (2,), comm=comm):
        heart = Objects.of(group_of(comm))._heartbeat
        assert heart is not None
        assert not heart._peers
        assert not heart._mailbox._sent.any()


def test_its_limit_must_be_seconds(comm, rank, monkeypatch):
    monkeypatch.setenv("HPCACCUM_HEARTBEAT", "soon" if rank == 1 else "60")
    said = "HPCACCUM_HEARTBEAT must be a number of seconds above 0, got 'soon'"
    with pytest.raises(hpc.InvalidArgumentError, match=said):
        hpc.ConditionalAccumulator("f4", (2,), comm=comm)

"""Groups: private communicators, exchanges, agreements."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.deadline import Deadline
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import complete, group_of
from hpcaccum.mpi.life.lifetime import _duplicate

from .acting import VAIN, WAIT, at, everywhere, interrupted, meet, same_bits, until

pytestmark = pytest.mark.own_comm


def test_ranks_are_written_as_ranges():
    for ranks, text in (
        ([], "ranks none"),
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        ([1, 2], "ranks 1-2"),
        ([9, 0, 1, 2, 3], "ranks 0-3, 9"),
        (range(64), "ranks 0-63"),
    ):
        assert format_ranks(ranks) == text


def test_communicator_has_one_group(comm, rank, size):
    group = group_of(comm)

    assert group_of(comm) is group
    assert group_of(group) is group
    assert (group.rank, group.size) == (rank, size)
    assert group is not group_of(None)
    assert group_of(None) is group_of(MPI.COMM_WORLD)
    assert repr(group) == f"Group(rank {rank} of {size}, {group.node.size} on its node)"


def test_first_use_does_not_know_which_ranks_are_missing(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
    pending = SimpleNamespace(Test=lambda: False)
    missing = SimpleNamespace(size=3, Idup=lambda: (None, pending))
    monkeypatch.setattr("hpcaccum.mpi.talk.creation.is_open_mpi", lambda: False)
    said = (
        "^first use of a communicator: waited .* s for the other ranks to make their "
        r"first object .*\(which of its 3 ranks are missing is not known yet\)$"
    )
    with pytest.raises(hpc.WaitTimeoutError, match=said):
        _duplicate(missing)


@pytest.mark.ranks(min=3)
def test_rank_0_learns_of_a_loss_from_a_rank_that_waits(comm, rank, size):
    group = group_of(comm)

    def lose():
        with group.control.lock:
            group.lost[size - 1] = "the last rank is lost"

    if rank == 1:
        threading.Timer(0.2, lose).start()
    if rank < size - 1:
        with pytest.raises(hpc.LostRankError, match="the last rank is lost"):
            group.allgather(rank, "lunch")
    meet()
    group.lost.clear()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("length", [1, 10**6])
def test_rank_that_is_missing_in_an_exchange_is_named(
    comm, rank, size, monkeypatch, which, length
):
    group, value = group_of(comm), "x" * length
    missing, text = size - 1, f"rank {size - 1} of {size} to make the same call"
    if which == "first":
        missing, text = 0, "rank 0 to answer"
    meet()  # the limit is not for what comes before
    # A long message takes its time if other jobs share the cores.
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN if length == 1 else 10 * VAIN))
    if rank != missing:
        with pytest.raises(hpc.WaitTimeoutError, match=f"dinner: .* {text}"):
            group.allgather(value, "dinner")
    meet()
    # A rank that is too late gets the error at once; then all are in step again.
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    if rank == missing:
        with pytest.raises(hpc.WaitTimeoutError, match="gave up"):
            group.allgather(value, "dinner")
    assert group.allgather(rank, "breakfast") == list(range(size))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("which", [0, -1])
def test_an_interrupted_exchange_ends_on_all_ranks(comm, rank, size, which):
    group = group_of(comm)
    meet()
    if rank == which % size:
        interrupted(group.allgather, rank, "dinner")
    meet()
    if rank != which % size:
        with pytest.raises(hpc.WaitTimeoutError, match="gave up"):
            group.allgather(rank, "dinner")
    assert group.allgather(rank, "breakfast") == list(range(size))


@pytest.mark.ranks(min=2)
def test_ranks_that_make_different_calls_get_an_error_that_names_both(comm, rank, size):
    group = group_of(comm)
    odd = size - 1
    for _ in range(3):
        with pytest.raises(hpc.DisagreementError) as caught:
            group.allgather(rank, "supper" if rank == odd else "lunch")

        assert " in 'lunch'" in str(caught.value)
        assert f"rank {odd} in 'supper'" in str(caught.value)
        assert group.allgather(rank, "again") == list(range(size))


@pytest.mark.ranks(min=2)
def test_retry_after_a_timeout_is_not_mistaken_for_the_first_call(
    comm, rank, size, monkeypatch
):
    def build(number):
        return group_of(comm).agree("building", lambda: {"number": number})

    group = group_of(comm)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
    if rank > 0:
        with pytest.raises(hpc.WaitTimeoutError):
            build(4)
    meet()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    if rank == 0:
        with pytest.raises(hpc.WaitTimeoutError, match=r"building: rank \d gave up"):
            build(3)
    with pytest.raises(hpc.DisagreementError, match="rank 0 has 3, rank 1 has 4"):
        build(3 if rank == 0 else 4)
    assert group.allgather(rank, "the end") == list(range(size))


def test_agreement_returns_what_was_checked(comm, rank):
    group, facts = group_of(comm), {"a": 1, "b": "x", "c": (2, None)}
    arguments = SimpleNamespace(a=1, b="x")

    assert group.agree("all", lambda: facts) is facts
    assert group.agree("attributes", lambda: arguments) is arguments
    assert group.agree("nothing", dict) == {}
    own = group.agree("part", lambda: [rank], facts=lambda own: {"n": len(own)})
    assert own == [rank]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("owner", [0, 1])
def test_value_of_an_unknown_class_fails_in_one_exchange(
    comm, rank, size, owner, monkeypatch
):
    class Known:
        """Known to its owner only."""

    group = group_of(comm)
    value: object = rank
    if rank == owner:
        Known.__qualname__ = "Known"
        monkeypatch.setitem(globals(), "Known", Known)
        value = Known()
    try:
        group.allgather(value, "first")
    except (AttributeError, TypeError, hpc.WaitTimeoutError) as error:
        found = str(error)
    else:
        found = "nothing"

    said = meet(found)
    if owner == 0:
        assert said[0] == "nothing"
        # What Python says differs between its versions.
        assert all("attribute 'Known'" in each for each in said[1:])
    else:
        text = "first: rank 0 cannot unpickle the value of rank 1: "
        assert said[0].startswith(text)
        assert "attribute 'Known'" in said[0]
        assert all(f"rank 0 gave up: {text}" in each for each in said[1:])
    assert group.allgather(rank, "second") == list(range(size))


@pytest.mark.ranks(min=2)
def test_wait_for_a_rank_that_frees_nothing_has_a_limit(comm, rank, size, monkeypatch):
    part = comm.Dup()
    group = group_of(part)
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
    if rank == 0:
        with pytest.raises(hpc.WaitTimeoutError, match=f"all {size} ranks to free it"):
            group.control.mailbox.drain()
    meet()
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    part.Free()

    assert group.comm == MPI.COMM_NULL


@pytest.mark.parametrize(
    ("raised", "elsewhere"),
    [
        (hpc.InvalidArgumentError, hpc.InvalidArgumentError),
        (TypeError, TypeError),
        (KeyError, RuntimeError),
    ],
)
def test_error_of_one_rank_is_raised_on_all(comm, rank, size, raised, elsewhere):
    wrong = size - 1

    def facts():
        if rank == wrong:
            raise raised("too bad")
        return {"a": 1}

    kind = raised if rank == wrong else elsewhere
    with pytest.raises(kind, match="too bad") as caught:
        group_of(comm).agree("opening", facts)
    if rank != wrong:
        assert str(caught.value).startswith(f"opening: rank {wrong}: ")


def test_messages_of_the_user_are_not_taken(comm, rank, size):
    # The same tag that the group uses, on the user's communicator.
    request = comm.irecv(source=(rank - 1) % size, tag=1)
    comm.send("mine", (rank + 1) % size, tag=1)
    assert group_of(comm).allgather(rank, "exchange") == list(range(size))

    assert request.wait() == "mine"


def test_group_of_something_else_is_refused():
    for other in (0, "world", MPI.COMM_NULL, MPI.GROUP_EMPTY):
        with pytest.raises(TypeError, match="must be an MPI intracommunicator"):
            group_of(other)


def test_accumulator_outlives_the_communicator_it_was_made_on(comm, size):
    part = comm.Dup()
    group = group_of(part)
    acc = hpc.ConditionalAccumulator("float64", (), comm=part)
    part.Free()

    everywhere(acc.apply_grad, 2)
    same_bits(at(1, acc.take_grad, size, timeout=WAIT), np.array(2.0))
    acc.free()
    assert group.comm == MPI.COMM_NULL


def test_a_group_is_freed_once_and_made_anew(comm, rank, size, capsys):
    part = comm.Dup()
    group = group_of(part)
    group.free()
    group.free()
    again = group_of(part)
    assert again.allgather(rank, "again") == list(range(size))
    part.Free()

    assert again is not group
    assert again.comm == group.comm == MPI.COMM_NULL
    # What mpi4py says of errors while a communicator is freed.
    assert capsys.readouterr().err == ""


def test_nodes_are_ordered_by_their_first_rank(comm):
    group = group_of(comm)
    ranks = group.node_ranks

    assert sorted(rank for node in group.nodes for rank in node) == [*range(comm.size)]
    assert [node[0] for node in group.nodes] == sorted(node[0] for node in group.nodes)
    assert ranks == group.node.allgather(group.rank)
    assert group.inside.size == len(ranks)
    assert group.inside.rank == ranks.index(comm.rank)


TAG = 11


@pytest.mark.ranks(min=2)
def test_a_wait_that_fails_keeps_the_memory(comm, rank):
    place: np.ndarray | None = np.zeros(3)
    kept = weakref.ref(place)
    if rank == 0:
        begun = map(comm.Irecv, (place,), (1,), (TAG,))
        with pytest.raises(hpc.WaitTimeoutError, match=r"rank 1$"):
            complete(begun, Deadline(VAIN, "receive"), lambda: "rank 1")
        del begun
    place = None
    gc.collect()
    meet()
    if rank == 1:
        complete([comm.Isend(np.ones(3), 0, TAG)], Deadline(WAIT, "send"), str)
    if rank == 0:
        # MPI goes on while it looks for messages.
        until(lambda: not comm.Iprobe() and kept().all())
        complete([], Deadline(WAIT, "nothing"), str)
        assert kept() is None
    meet()


def test_cores_are_shared_with_ranks_that_may_run_on_them(comm, monkeypatch):
    ranks, found = hpc.group_of(comm).node.size, []
    for cores in (ranks, 2 * ranks, 5 * ranks - 1, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        group = hpc.Group(comm.Dup())
        found.append(group.own_cores)
        group.free()

    assert found == [1, 2, 4, 1]


def test_ranks_that_are_bound_have_cores_of_their_own(comm, rank, monkeypatch):
    own = set(range(100 * rank, 100 * rank + 2 + rank))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    group = hpc.Group(comm.Dup())
    group.free()

    # All ranks know the least number.
    assert (group.own_cores, group.least_cores) == (2 + rank, 2)

"""Objects that are freed once: by a call, by a ``with`` block, or at the end."""

from __future__ import annotations

import copy
import pickle

import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.mpi import Freeable, Objects, group_of
from hpcaccum.mpi.job import shutdown

from .acting import meet

pytestmark = [pytest.mark.own_comm, pytest.mark.any_size]


class Thing(Freeable):
    """Appends its name to a list when it is freed, or raises an error."""

    def __init__(self, name, freed, group=None, error=None):
        self.name, self.list, self.error = name, freed, error
        if group is not None:
            self._register(group, group.label(name))

    def _describe(self):
        return f"thing {self.name!r}"

    def _free(self):
        if self.error is not None:
            raise self.error
        self.list.append(self.name)


@pytest.fixture(autouse=True)
def own_list(monkeypatch):
    """Lists of open objects for this test; as if the program were not ending."""
    monkeypatch.setattr(shutdown, "_open", [])
    monkeypatch.setattr(shutdown, "_ending", False)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(way):
    with pytest.raises(TypeError) as caught:
        way(Thing("one", []))

    assert str(caught.value) == (
        "thing 'one' cannot be copied or pickled, because all ranks share it"
    )


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_can_be_saved_of_it_is_in_the_message(comm, way):
    made = [
        hpc.ConditionalAccumulator("float32", (3,), comm=comm),
        hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm),
    ]
    for each in made:
        with pytest.raises(
            TypeError, match=r"; snapshot\(\) returns what can be saved$"
        ):
            way(each)
        each.free()


@pytest.mark.parametrize("registered", [True, False])
def test_it_is_freed_once(comm, registered):
    freed = []
    thing = Thing("a", freed, group_of(comm) if registered else None)
    assert not thing.freed
    thing._check_open()

    for _ in range(3):
        thing.free()

    assert thing.freed
    assert freed == ["a"]
    with pytest.raises(hpc.FreedError, match=r"^thing 'a' was freed$"):
        thing._check_open()


def test_messages_use_the_type_by_default():
    class Other(Freeable):
        def _free(self):
            pass

    other = Other()
    other.free()
    with pytest.raises(hpc.FreedError, match=r"^Other was freed$"):
        other._check_open()


def test_it_is_open_if_freeing_it_failed(comm):
    freed = []
    thing = Thing("a", freed, group_of(comm), ValueError("not yet"))
    with pytest.raises(ValueError, match="not yet"):
        thing.free()
    assert not thing.freed
    assert shutdown.count_open() == 1

    thing.error = None
    thing.free()
    assert thing.freed
    assert freed == ["a"]
    assert shutdown.count_open() == 0


def test_what_its_group_keeps_is_released_by_a_later_call(comm, monkeypatch):
    group, freed = group_of(comm), []
    objects, thing = Objects.of(group), Thing("a", freed, group)
    with monkeypatch.context() as patch:
        patch.setattr("hpcaccum.mpi.life.heartbeat.Heartbeat.stop", late)
        patch.setattr(objects, "_free_if_unused", late)
        with pytest.raises(hpc.WaitTimeoutError, match="late"):
            thing.free()
    assert thing.freed
    assert shutdown.count_open() == 1

    thing.free()
    assert (objects._open, objects._heartbeat) == ([], None)
    assert freed == ["a"]
    assert shutdown.count_open() == 0


def late(*args):
    raise hpc.WaitTimeoutError("late")


def test_what_is_open_at_the_end_is_freed_last_registered_first(comm):
    group, freed = group_of(comm), []
    first, second, third = (Thing(name, freed, group) for name in "abc")
    Thing("unregistered", freed)
    second.free()
    shutdown._close_all()
    shutdown._close_all()

    assert freed == ["b", "c", "a"]
    assert first.freed
    assert third.freed
    first.free()
    assert freed == ["b", "c", "a"]


def test_the_communicators_stay_until_the_last_object_is_freed(comm, rank, size):
    part = comm.Dup()
    group, freed = group_of(part), []
    things = [Thing(name, freed, group) for name in "ab"]
    part.Free()
    assert group.allgather(rank, "still there") == list(range(size))
    things[0].free()
    things[0].free()
    assert group.allgather(rank, "still there") == list(range(size))
    things[1].free()

    assert group.comm == MPI.COMM_NULL


def test_labels_are_unique_and_the_same_on_all_ranks(comm):
    group = group_of(comm)
    labels = [Thing("a", [], group).label for _ in range(3)]

    assert labels == [f"a (number {n})" for n in (1, 2, 3)]
    assert meet(labels) == [labels] * len(meet())
    shutdown._close_all()

"""Windows: words that all ranks change, and memory that they reach one-sidedly."""

import errno

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from hpcaccum.mpi import group_of
from hpcaccum.mpi.memory import atomic_words
from hpcaccum.mpi.memory import region as region_module
from hpcaccum.mpi.memory import windows as module
from hpcaccum.mpi.memory.region import Region
from hpcaccum.nodes import words_of

from ..common import WAIT
from .acting import at, everywhere, in_threads, meet, until
from .support import add_often

pytestmark = [pytest.mark.own_comm, pytest.mark.any_size]


@pytest.fixture(params=["first", "last"])
def words(request, comm):
    host = 0 if request.param == "first" else comm.size - 1
    made = words_of(group_of(comm), host, 20)
    yield made
    meet()
    made.free()


def test_words_are_integers_of_all_ranks(words):
    large, low = 2**63 - 1, -(2**63)
    assert words.read_range(0, 20) == [0] * 20
    meet()
    at(1, words.write, 3, large)
    at(2, words.store, 4, [low, 7])
    for found in everywhere(words.read_range, 2, 5):
        assert found == [0, large, low, 7, 0]
    # Each returns what was.
    assert [at(1, words.fetch_add, 2, n) for n in (5, -7, 0)] == [0, 5, -2]
    assert at(1, words.compare_and_swap, 2, -2, 9) == -2
    assert at(2, words.compare_and_swap, 2, -2, 5) == 9
    assert at(1, words.exchange, 2, low) == 9
    assert everywhere(words.read, 2) == [low] * len(meet())


class Spy:
    """A window that remembers what was called."""

    MOVES = ("Put", "Get", "Accumulate")

    def __init__(self, window):
        self.window, self.calls = window, []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)
            return method(*args, **kwargs)

        method = getattr(self.window, name)
        return call

    def during(self, call, *args):
        self.calls.clear()
        call(*args)
        return list(self.calls)


# Shared memory, and a network without load, would hide a missing flush or fence.


def test_words_have_changed_when_a_call_returns(comm, words, monkeypatch):
    if words.direct:
        spy = Spy(words._window)
        monkeypatch.setattr(words, "_window", spy)
        monkeypatch.setattr(words, "sync", spy.Sync)
        # A rank that is alone sends itself a message.
        ends = "Sync" if len(group_of(comm).node_ranks) > 1 else "Flush"
        for call, name in [
            ((words.fetch_add, 1, 1), "Fetch_and_op"),
            ((words.exchange, 1, 0), "Fetch_and_op"),
            ((words.compare_and_swap, 1, 0, 0), "Compare_and_swap"),
        ]:
            assert spy.during(*call) == [name, ends]
        assert spy.during(words.sync) == ["Sync"]
    meet()


class Ordered(Spy):
    """Words that remember when memory was stored to, and when it was ordered."""

    def __getitem__(self, index):
        self.calls.append("load")
        return self.window[index]

    def __setitem__(self, index, value):
        self.calls.append("store")
        self.window[index] = value


def test_words_are_stored_after_a_fence_and_loaded_before_one(comm, monkeypatch):
    words = words_of(group_of(comm), 0, 4)
    if words.direct:
        order = Ordered(words.memory)
        monkeypatch.setattr(words, "memory", order)
        window = Spy(words._window)
        window.calls = order.calls
        monkeypatch.setattr(words, "sync", window.Sync)
        assert order.during(words.read, 1) == ["load", "Sync"]
        assert order.during(words.read_range, 1, 2) == ["load", "Sync"]
        assert order.during(words.write, 1, 0) == ["Sync", "store", "Sync"]
        assert order.during(words.store, 1, [0, 0])[:2] == ["Sync", "store"]
    meet()
    words.free()


def test_vectors_have_moved_when_a_call_returns(comm, monkeypatch):
    region = Region(group_of(comm), 0, 80)
    spy = Spy(region._window)
    monkeypatch.setattr(region, "_window", spy)
    for move in (region.put, region.accumulate, region.get):
        calls = spy.during(move, 0, np.zeros(10))
        assert calls[0] in Spy.MOVES
        assert calls[-1] == "Flush"
    assert spy.during(region.sync) == ["Sync"]
    meet()
    region.free()


def test_additions_of_all_ranks_and_threads_count(words, size):
    def add():
        for _ in range(40):
            words.fetch_add(1, 1)

    everywhere(in_threads, add, add, add)
    assert at(0, words.read, 1) == 120 * size


@pytest.mark.ranks(min=2)
def test_an_exchange_among_additions_is_not_lost(words, rank):
    # In memory of its own node a rank is faster; elsewhere an agent makes the changes.
    number = 20_000 if words.direct else 100

    def exchange():
        until(lambda: words.read(1))
        # Additions are to the other half of the word.
        found = [words.exchange(1, each << 32) >> 32 for each in range(1, number + 1)]
        words.write(2, 1)
        return [pair for pair in enumerate(found) if len(set(pair)) > 1][:3]

    def act():
        if rank == 0:
            return exchange()
        return add_often(words, 1, 1, until=lambda: words.read(2))

    assert everywhere(act)[0] == []


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_vectors_are_put_added_and_got_in_pieces(comm, rank, dtype, monkeypatch):
    # As those are that are larger than one MPI call moves.
    monkeypatch.setattr(region_module, "_CHUNK_BYTES", 40)
    region = Region(group_of(comm), comm.size - 1, 400)
    data = np.arange(37, dtype=dtype)
    offset = 16

    at(1, region.put, offset, data)
    everywhere(region.accumulate, offset, data)
    found = np.full(39, -1, dtype)
    region.get(offset - data.itemsize, found)

    expected = np.concatenate([[0], data * (1 + comm.size), [0]])
    np.testing.assert_array_equal(found, expected.astype(dtype))
    meet()
    region.free()


def test_window_whose_memory_others_take_is_refused_on_every_rank(comm, monkeypatch):
    def full(*_):
        # What the system says of a page that it cannot provide.
        raise OSError(errno.EFAULT, "Bad address")

    with monkeypatch.context() as patch:
        patch.setattr(module, "pieces", full)
        with pytest.raises(hpc.InvalidArgumentError, match=r"/dev/shm, .* --shm-size"):
            words_of(group_of(comm), comm.size - 1, 8)
    meet()


def test_window_is_refused_where_mpi_can_make_no_communicator(comm, monkeypatch):
    group = group_of(comm)
    # The windows of words are those of a node.
    whose = group if group.single_node else group.inside
    real = whose.comm

    class Exhausted:
        def __getattr__(self, name):
            return getattr(real, name)

        def Dup(self):
            raise MPI.Exception(MPI.ERR_OTHER)

    with monkeypatch.context() as patch:
        patch.setattr(whose, "comm", Exhausted())
        with pytest.raises(RuntimeError, match=r"\d+ objects of hpcaccum are open"):
            words_of(group, 0, 8)


@pytest.fixture
def windows(one_node, monkeypatch):
    """The windows of words that are made: root, bytes, and what is called."""
    made, allocate = [], atomic_words.allocate

    def watched(group, root, nbytes, unit):
        made.append((root, nbytes, Spy(allocate(group, root, nbytes, unit))))
        return made[-1][-1]

    monkeypatch.setattr(atomic_words, "allocate", watched)
    return made


def freed(windows):
    return sum("Free" in window.calls for *_, window in windows)


def test_objects_with_words_on_one_rank_share_a_window(comm, size, windows):
    own = comm.Dup()
    group, roots = group_of(own), [0, size - 1][: min(size, 2)]
    for turn in range(2):
        made = [words_of(group, root, 20) for root in (0, 0, 0, size - 1)]
        # Each has words of its own.
        for number, words in enumerate(made, 1):
            at(1, words.store, 0, [number] * 20)
        for number, words in enumerate(made, 1):
            assert everywhere(words.read_range, 0, 20) == [[number] * 20] * size
            assert everywhere(words.fetch_add, 19, 0) == [number] * size
        for words in made:
            words.free()
        # They are kept for later words.
        assert [root for root, *_ in windows] == roots, turn
        assert not freed(windows)
    own.Free()
    assert freed(windows) == len(roots)


def test_new_words_are_0_where_others_were_freed(comm, windows):
    group = group_of(comm)
    # 256 such parts are all that a window has.
    others = words_of(group, 0, 1)
    for _ in range(1000):
        words = words_of(group, 0, 16)
        # No rank waits for the others. A late one must not set the word to 0 again.
        before = words.fetch_add(0, 1)
        assert 0 <= before < comm.size
        words.free()
    assert len(windows) == 4
    # The first one has a user; the last one is kept.
    assert freed(windows) == 2
    others.write(0, 5) if comm.rank == 0 else None
    meet()
    assert others.read(0) == 5
    meet()
    others.free()
    assert freed(windows) == 3


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.ranks(min=2)
def test_windows_are_given_up_if_ranks_have_taken_different_words(
    comm, rank, size, inside
):
    group = group_of(comm)
    whose = group.inside if inside else group
    if not whose.single_node:
        pytest.skip("words are those of a node")
    others = words_of(whose, 0, 1)
    # As an interrupted constructor leaves it.
    if rank == size - 1:
        whose.words.get(0).take(1)
    before = whose.words.get(0)
    with hpc.ConditionalAccumulator("f8", (3,), comm=comm) as acc:
        acc.apply_grad(np.full(3, rank + 1.0))
        meet()
        if rank == 0:
            mean = acc.take_grad(size, timeout=WAIT)
            assert (mean == (size + 1) / 2).all()
        words = words_of(whose, 0, 1)
        at(0, words.write, 0, 7)
        near = group.nodes[0] if inside else range(size)
        assert everywhere(words.read, 0) == [7 * (r in near) for r in range(size)]
        words.free()
    # A rank alone agrees with itself.
    assert (whose.words.get(0) is before) == (whose.size == 1)
    others.free()


def test_words_that_have_no_room_get_a_window_of_their_own(comm, windows):
    group = group_of(comm)
    few, many = words_of(group, 0, 8), words_of(group, 0, 5000)
    at(0, many.write, 4999, 7)

    assert everywhere(many.read, 4999) == [7] * comm.size
    assert [nbytes for _, nbytes, _ in windows] == [4096 * 8, 5000 * 8]
    meet()
    few.free()
    assert freed(windows) == 1
    many.free()

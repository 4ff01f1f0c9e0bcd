"""TicketLock: first come, first served."""

from __future__ import annotations

import threading

import pytest

import hpcaccum as hpc
from hpcaccum.accumulator.ticket_lock import _DRAWING, TicketLock
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import AtomicWords
from hpcaccum.mpi.group import Group

from .acting import VAIN, Background, at, everywhere, meet, until
from .support import WAIT


@pytest.fixture
def words(comm):
    made = AtomicWords(Group.of(comm), comm.size - 1, 3 + comm.size)
    yield made
    meet()
    made.free()


@pytest.fixture
def line(words, rank, size):
    return TicketLock(words, 1, rank, size)


class Holder(Background):
    """Holds the lock on one rank until `let_go`. Collective."""

    def __init__(self, line, words, rank):
        self.turn, self.release = threading.Event(), threading.Event()
        super().__init__(rank, lambda: self._hold(line))
        # In line, if not at its head.
        at(rank, until, lambda: words.read(2 + self.rank) > 0)

    def _hold(self, line):
        def wait():
            self.turn.set()
            assert self.release.wait(WAIT)

        line.hold(Deadline(WAIT, "holding"), wait)

    def has_turn(self):
        return at(self.rank, self.turn.is_set)

    def gets_turn(self):
        return at(self.rank, self.turn.wait, WAIT)

    def let_go(self):
        self.release.set()
        self.result()


def test_the_lock_is_free_if_no_rank_waits(line):
    for rank in range(4):
        assert at(rank, line.hold, Deadline(0, "call"), lambda: True)


def test_line_keeps_to_its_cells(line, words, size):
    line.hold(Deadline(WAIT, "call"), lambda: None)
    meet()

    assert words.read(0) == 0
    assert at(0, words.read, 1) == size
    assert words.read_range(2, size + 1) == [0] * (size + 1)


def test_one_at_a_time(line, words):
    def increment():
        words.write(0, words.read(0) + 1)

    def all_of_them():
        for _ in range(10):
            line.hold(Deadline(WAIT, "call"), increment)

    everywhere(all_of_them)
    assert at(0, words.read, 0) == 10 * len(meet())


@pytest.mark.ranks(min=3)
def test_turns_come_in_order_of_arrival(line, words, size):
    order = [1, 0, 2]
    holders = [Holder(line, words, rank) for rank in order]
    for place, holder in enumerate(holders):
        assert holder.gets_turn()
        assert not any(later.has_turn() for later in holders[place + 1 :])
        holder.let_go()


@pytest.mark.ranks(min=3)
def test_a_place_that_is_given_up_delays_no_rank(line, words):
    first = Holder(line, words, 0)

    def give_up():
        expected = "call: waited .* s for rank 0, ahead of this rank"
        with pytest.raises(hpc.WaitTimeoutError, match=expected):
            line.hold(Deadline(VAIN, "call"), lambda: pytest.fail("had the turn"))

    at(1, give_up)
    last = Holder(line, words, 2)
    first.let_go()
    assert last.gets_turn()
    last.let_go()


def test_error_in_a_turn_passes_it_on(line):
    def fail():
        with pytest.raises(KeyError):
            line.hold(Deadline(WAIT, "call"), lambda: {}[0])

    at(1, fail)
    at(0, fail)
    at(1, fail)


def test_threads_of_a_rank_share_a_place(line, words):
    holder = Holder(line, words, 1)

    def in_vain():
        with pytest.raises(hpc.WaitTimeoutError, match="another thread of this rank"):
            line.hold(Deadline(VAIN, "call"), lambda: pytest.fail("had the turn"))

    at(1, in_vain)
    holder.let_go()


@pytest.mark.ranks(min=2)
def test_who_draws_a_ticket_is_waited_for(line, words):
    # Its ticket may turn out to be the lower one.
    at(0, words.write, 2, _DRAWING)
    waiting = Holder(line, words, 1)
    assert not waiting.has_turn()
    at(0, words.write, 2, 0)

    assert waiting.gets_turn()
    waiting.let_go()


@pytest.mark.ranks(min=2)
def test_ticket_is_drawn_while_others_see_it(line, words, monkeypatch):
    seen = []
    add = words.fetch_add

    def look_and_add(index, value):
        seen.append(words.read_range(2, 2)[0])
        return add(index, value)

    monkeypatch.setattr(words, "fetch_add", look_and_add)

    def use():
        return list(seen), words.read_range(2, 2)[0]

    drawing, place = at(0, line.hold, Deadline(WAIT, "call"), use)
    assert drawing == [_DRAWING]
    assert place == 1

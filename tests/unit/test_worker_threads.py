"""Helper threads that share the pieces of one call; naps that other threads end."""

from __future__ import annotations

import queue
import threading

import pytest

from hpcaccum import worker_threads as helpers
from hpcaccum.deadline import Deadline, Waiting, Wake
from hpcaccum.worker_threads import run_pieces

from ..common import VAIN, WAIT


@pytest.fixture
def none_yet(monkeypatch):
    """Begin without helpers; those of other tests wait for what never comes."""
    monkeypatch.setattr(helpers, "_threads", [])
    monkeypatch.setattr(helpers, "_waiting", queue.SimpleQueue())


def test_pieces_run_at_the_same_time(none_yet):
    together = threading.Barrier(3)
    for _ in range(3):
        run_pieces(lambda _: together.wait(WAIT), range(3), 2)

    assert [thread.daemon for thread in helpers._threads] == [True, True]


def test_calls_elsewhere_run_on_other_threads(none_yet):
    seen = []
    for call in helpers.run_elsewhere(lambda: seen.append(threading.get_ident()), 3):
        call.result()

    assert len(seen) == 3
    assert threading.get_ident() not in seen


def test_if_no_thread_can_start_one_does_all(none_yet, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done, here = [], threading.get_ident()
    run_pieces(lambda item: done.append((item, threading.get_ident())), range(4), 3)
    assert sorted(done) == [(item, here) for item in range(4)]
    assert not helpers.run_elsewhere(lambda: done.append("call"), 3)
    assert done[-1] == "call"


def test_a_piece_that_no_helper_begins_is_done_by_the_caller(none_yet):
    begun, over, done = threading.Event(), threading.Event(), []

    def busy(item):
        if item == "theirs":
            begun.set()
            assert over.wait(WAIT)
        else:
            assert begun.wait(WAIT)

    caller = threading.Thread(target=run_pieces, args=(busy, ["own", "theirs"], 1))
    caller.start()
    assert begun.wait(WAIT)
    run_pieces(done.append, range(3), 1)
    over.set()
    caller.join(WAIT)

    assert sorted(done) == [0, 1, 2]
    assert not caller.is_alive()


@pytest.mark.parametrize("fails", ["own", "theirs"])
def test_what_fails_is_raised_when_all_have_ended(none_yet, fails):
    both, ended = threading.Barrier(2), []

    def act(item):
        both.wait(WAIT)
        if item == fails:
            raise ValueError(item)
        threading.Event().wait(VAIN)
        ended.append(item)

    with pytest.raises(ValueError, match=fails):
        run_pieces(act, ["own", "theirs"], 1)

    assert len(ended) == 1


def test_after_a_fork_there_are_new_ones(none_yet):
    ended = threading.Thread(target=bool)
    ended.start()
    ended.join(WAIT)
    helpers._threads.append(ended)
    together = threading.Barrier(2)
    run_pieces(lambda _: together.wait(WAIT), range(2), 1)

    assert ended not in helpers._threads


def test_nap_ends_when_another_thread_says_so():
    wake, result = Wake(), []
    thread = threading.Thread(target=lambda: result.append(wake.nap(WAIT)))
    thread.start()
    wake.wake()
    thread.join(WAIT)

    assert result == [True]


@pytest.mark.parametrize("end", [Waiting.wake, Waiting.look])
def test_wait_ends_with_the_change(end):
    waiting, happened = Waiting(blocks=True), []
    begun = threading.Event()

    def fact():
        begun.set()
        return bool(happened)

    thread = threading.Thread(
        target=waiting.wait, args=(fact, Deadline(WAIT, "test"), str)
    )
    thread.start()
    assert begun.wait(WAIT)
    # Nothing has happened yet: the wait goes on.
    end(waiting)
    happened.append(True)
    end(waiting)
    thread.join(WAIT)

    assert not thread.is_alive()

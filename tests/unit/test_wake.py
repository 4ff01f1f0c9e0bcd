"""Naps that other threads end."""

from __future__ import annotations

import threading

import pytest

from hpcaccum import WaitTimeoutError
from hpcaccum.deadline import Deadline, Wake
from hpcaccum.server.publisher import Change

from ..common import WAIT


def test_nap_ends_when_another_thread_says_so():
    wake, result = Wake(), []
    thread = threading.Thread(target=lambda: result.append(wake.nap(WAIT)))
    thread.start()
    wake.wake()
    thread.join(WAIT)

    assert result == [True]


def test_calls_before_a_nap_count_as_one():
    wake = Wake()
    wake.wake()
    wake.wake()

    assert wake.nap(0.0)
    assert not wake.nap(0.0)


def test_wait_ends_with_the_change():
    change, happened = Change(made_here=True), []
    begun = threading.Event()

    def fact():
        begun.set()
        return bool(happened)

    thread = threading.Thread(
        target=change.wait, args=(fact, Deadline(WAIT, "test"), str)
    )
    thread.start()
    assert begun.wait(WAIT)
    # Nothing has happened yet: the wait goes on.
    change.announce()
    happened.append(True)
    change.announce()
    thread.join(WAIT)

    assert not thread.is_alive()


@pytest.mark.parametrize("made_here", [True, False])
def test_wait_has_a_limit(made_here):
    change = Change(made_here=made_here)
    with pytest.raises(WaitTimeoutError, match=r"waited .* for an answer"):
        change.wait(lambda: False, Deadline(0.01, "test"), lambda: "an answer")

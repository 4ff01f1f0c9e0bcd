"""Deadlines: waits that end, and are not silent."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import deadline as module
from hpcaccum.deadline import Deadline
from hpcaccum.errors import LostRankError

from ..common import WAIT


def never():
    return None


@pytest.mark.parametrize("how", ["wait", "block"])
@pytest.mark.parametrize("result", ["it", False, 0, ""])
def test_what_is_there_at_once_needs_no_time(how, result):
    looks = []
    look = lambda *seconds: looks.append(seconds) or result  # noqa: E731

    assert getattr(Deadline(0, "call"), how)(look, str) == result
    assert len(looks) == 1


@pytest.mark.parametrize("how", ["wait", "block"])
def test_a_wait_ends_when_the_time_is_over(how):
    looks, deadline = [], Deadline(0.05, "call")

    def look(*seconds):
        looks.append(seconds)
        time.sleep(*seconds)

    text = r"^call: waited [\d.]+ s for rain$"
    for _ in range(3):  # which share the limit
        with pytest.raises(hpc.WaitTimeoutError, match=text):
            getattr(deadline, how)(look if how == "block" else never, lambda: "rain")

    assert (deadline.expired, deadline.remaining) == (True, 0)
    assert 0.05 <= deadline.elapsed < WAIT
    assert len(looks) < 9  # it sleeps until the limit, and does not poll
    with pytest.raises(TimeoutError):
        Deadline(0, "call").wait(lambda: looks.clear(), lambda: "rain")


def test_what_happens_during_the_last_nap_counts(monkeypatch):
    monkeypatch.setattr(module, "EAGER", 0)
    # A nap takes longer than it should.
    slow = lambda seconds: time.sleep(0.02)  # noqa: E731
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=slow)
    monkeypatch.setattr(module, "time", clock)
    looks = iter([None, "just in time"])

    wait = Deadline(0.01, "call").wait
    assert wait(lambda: next(looks), lambda: "rain") == "just in time"


@pytest.mark.parametrize("text", [None, ""])
def test_without_a_limit_there_is_no_end(monkeypatch, text):
    monkeypatch.delenv("HPCACCUM_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", text)
    deadline = Deadline(None, "call")

    assert deadline.remaining == math.inf
    assert not deadline.expired
    looks = iter([None] * 200 + ["found"])
    assert deadline.wait(lambda: next(looks), lambda: "rain") == "found"


@pytest.mark.parametrize("text", ["0.01", " 1e-2 ", "soon", "0", "-1", "nan", "1 s"])
def test_environment_sets_the_limit(monkeypatch, text):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", text)
    if text.strip() in ("0.01", "1e-2"):
        assert Deadline(None, "call").remaining <= 0.01
        assert Deadline(5, "call").remaining > 1
        with pytest.raises(hpc.WaitTimeoutError):
            Deadline(None, "call").wait(never, lambda: "rain")
    else:
        with pytest.raises(hpc.InvalidArgumentError, match="seconds above 0, got"):
            Deadline(None, "call")


@pytest.mark.parametrize("how", ["wait", "block"])
def test_a_long_wait_is_not_silent_but_ever_more_rarely_heard(monkeypatch, caplog, how):
    assert module.FIRST_WARNING == 60
    monkeypatch.setattr(module, "FIRST_WARNING", 0.01)
    look = never if how == "wait" else time.sleep
    with (
        caplog.at_level(logging.WARNING, "hpcaccum"),
        pytest.raises(hpc.WaitTimeoutError),
    ):
        getattr(Deadline(0.15, "call"), how)(look, lambda: "rain")

    # After 10, 20, 40 and 80 ms; a slow machine may miss some.
    assert 1 <= len(caplog.messages) <= 5
    assert re.fullmatch(r"call: waited \S+ s for rain", caplog.messages[0])
    assert all(r.name == "hpcaccum" for r in caplog.records)


@pytest.mark.parametrize("timeout", [1, 2.5, np.float32(1), np.int64(3), math.inf])
def test_timeout_is_a_real_number_and_not_negative(timeout):
    assert Deadline(timeout, "call").remaining > 0.5
    for wrong in (-timeout, math.nan):
        with pytest.raises(hpc.InvalidArgumentError, match="timeout must be at least"):
            Deadline(wrong, "call")
    for wrong in (str(timeout), [timeout], True, 1j):
        with pytest.raises(TypeError, match="timeout must be a number of seconds or"):
            Deadline(wrong, "call")


@pytest.mark.parametrize("how", ["wait", "block"])
def test_all_waits_end_when_a_rank_is_lost(monkeypatch, how):
    monkeypatch.setattr(module, "_reasons", [])
    looks = []

    def look(*_):
        looks.append(1)
        if len(looks) == 3:
            module.end_waits("rank 1 is lost")

    with pytest.raises(LostRankError, match="call: rank 1 is lost"):
        getattr(Deadline(None, "call"), how)(look, str)
    assert len(looks) == 3
    # What needs no wait is still possible.
    assert Deadline(None, "call").wait(lambda: 7, str) == 7


def test_a_message_that_others_do_not_explain_names_them(monkeypatch):
    monkeypatch.setattr(module, "_GRACE", 0.02)

    def ask():
        return Deadline(None, "words").wait(never, lambda: "the agent")

    begin = time.monotonic()
    with pytest.raises(hpc.WaitTimeoutError) as caught:
        Deadline(0, "call").wait(never, lambda: f"{ask()}, {ask()}")

    assert re.fullmatch(r"call: waited [\d.]+ s for the agent", str(caught.value))
    assert time.monotonic() - begin < WAIT
    # Only for the message: later waits have no such limit.
    assert Deadline(None, "later").remaining == math.inf


def test_waits_within_a_limit_are_part_of_the_call():
    deadline = Deadline(0.02, "call")
    with (
        pytest.raises(hpc.WaitTimeoutError, match=r"call: waited .* for the agent"),
        deadline.limits(),
    ):
        Deadline(None, "words").wait(never, lambda: "the agent")


def test_time_of_all_waits_of_a_call_is_added_up():
    deadline = Deadline(0.03, "call")
    assert deadline.wait(lambda: "at once", str) == "at once"
    assert deadline.waited == 0

    with pytest.raises(hpc.WaitTimeoutError):
        deadline.wait(never, lambda: "rain")
    first = deadline.waited
    assert 0.02 < first <= deadline.elapsed

    with pytest.raises(hpc.WaitTimeoutError):
        deadline.block(lambda seconds: time.sleep(0.01), lambda: "rain")
    assert deadline.waited >= first


def test_join_waits_for_a_thread():
    begin = threading.Event()
    thread = threading.Thread(target=begin.wait, args=(WAIT,))
    thread.start()
    with pytest.raises(hpc.WaitTimeoutError, match=r"call: waited .* s for the thread"):
        Deadline(0.02, "call").join(thread, lambda: "the thread")
    begin.set()
    Deadline(WAIT, "call").join(thread, lambda: "the thread")

    assert not thread.is_alive()
    Deadline(0, "call").join(thread, lambda: "the thread")

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


def test_ready_at_once_needs_no_time():
    assert Deadline(0, "call").wait(lambda: "it", lambda: "nothing") == "it"


def test_false_and_zero_are_results():
    results = [Deadline(0, "call").wait(lambda r=r: r, str) for r in (False, 0, "")]

    assert results == [False, 0, ""]


def test_timeout_0_looks_exactly_once():
    looks = []
    with pytest.raises(hpc.WaitTimeoutError, match=r"call: waited .* s for rain"):
        Deadline(0, "call").wait(lambda: looks.append(1), lambda: "rain")

    assert len(looks) == 1


def test_what_happens_during_the_last_nap_counts(monkeypatch):
    monkeypatch.setattr(module, "EAGER", 0)
    # A nap takes longer than it should.
    naps = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.02)
    )
    monkeypatch.setattr(module, "time", naps)
    deadline = Deadline(0.01, "call")
    looks = iter([None, "just in time"])

    assert deadline.wait(lambda: next(looks), lambda: "rain") == "just in time"


def test_wait_ends_when_the_time_is_over():
    begin = time.monotonic()
    deadline = Deadline(0.05, "call")
    with pytest.raises(TimeoutError):
        deadline.wait(never, lambda: "rain")

    assert time.monotonic() - begin >= 0.05
    assert deadline.expired
    assert deadline.remaining == 0
    assert deadline.elapsed >= 0.05


def test_several_waits_share_one_limit():
    deadline = Deadline(0.05, "call")
    for _ in range(3):
        with pytest.raises(hpc.WaitTimeoutError):
            deadline.wait(never, lambda: "rain")

    assert deadline.elapsed < 10


def test_without_a_limit_there_is_no_end(monkeypatch):
    monkeypatch.delenv("HPCACCUM_TIMEOUT", raising=False)
    deadline = Deadline(None, "call")

    assert deadline.remaining == math.inf
    assert not deadline.expired
    looks = iter([None] * 200 + ["found"])
    assert deadline.wait(lambda: next(looks), lambda: "rain") == "found"


@pytest.mark.parametrize("text", ["0.01", " 1e-2 "])
def test_environment_sets_the_limit(monkeypatch, text):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", text)

    assert Deadline(None, "call").remaining <= 0.01
    assert Deadline(5, "call").remaining > 1
    with pytest.raises(hpc.WaitTimeoutError):
        Deadline(None, "call").wait(never, lambda: "rain")


def test_empty_environment_is_no_limit(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "")

    assert Deadline(None, "call").remaining == math.inf


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1 s"])
def test_environment_must_be_seconds(monkeypatch, text):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", text)
    with pytest.raises(
        hpc.InvalidArgumentError, match="a number of seconds above 0, got"
    ):
        Deadline(None, "call")


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_timeout_is_not_negative(timeout):
    with pytest.raises(hpc.InvalidArgumentError, match="timeout must be at least 0 s"):
        Deadline(timeout, "call")


@pytest.mark.parametrize("timeout", ["1", [1], True, 1j])
def test_timeout_is_a_number(timeout):
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
        Deadline(timeout, "call")


@pytest.mark.parametrize("timeout", [1, 2.5, np.float32(1), np.int64(3), math.inf])
def test_timeout_may_be_any_real_number(timeout):
    assert Deadline(timeout, "call").remaining > 0.5


def test_long_wait_is_not_silent_but_ever_more_rarely_heard(monkeypatch, caplog):
    monkeypatch.setattr(module, "FIRST_WARNING", 0.01)
    deadline = Deadline(0.15, "call")
    with (
        caplog.at_level(logging.WARNING, "hpcaccum"),
        pytest.raises(hpc.WaitTimeoutError),
    ):
        deadline.wait(never, lambda: "rain")

    # After 10, 20, 40 and 80 ms; a slow machine may miss some.
    assert 1 <= len(caplog.messages) <= 4
    assert caplog.messages[0].startswith("call: waited ")
    assert caplog.messages[0].endswith(" s for rain")
    assert all(r.name == "hpcaccum" for r in caplog.records)


def test_first_warning_comes_after_a_minute():
    assert module.FIRST_WARNING == 60


def test_naps_grow_with_the_wait():
    waits = [module.EAGER * 1.1**n for n in range(100)]
    naps = [module.nap_after(waited) for waited in waits]

    assert naps == sorted(naps)
    for waited, nap in zip(waits, naps, strict=True):
        assert 0 < nap <= module._PART * waited
        assert nap <= max(2e-4, module._SMALL_PART * waited)
    assert module.nap_after(1000.0) == 5e-3


def watch_naps(monkeypatch):
    """Return a list to which naps are added instead of being taken."""
    naps = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=naps.append)
    monkeypatch.setattr(module, "time", clock)
    return naps


def test_what_comes_at_once_is_not_slept_for(monkeypatch):
    monkeypatch.setattr(module, "EAGER", WAIT)
    naps = watch_naps(monkeypatch)
    looks = iter([None] * 100 + ["found"])

    assert Deadline(WAIT, "call").wait(lambda: next(looks), str) == "found"
    assert not naps


def test_what_takes_long_does_not_keep_the_core(monkeypatch):
    monkeypatch.setattr(module, "EAGER", 0)
    naps = watch_naps(monkeypatch)
    looks = iter([None] * 100 + ["found"])

    assert Deadline(WAIT, "call").wait(lambda: next(looks), str) == "found"
    assert len(naps) == 100


@pytest.mark.parametrize(
    ("moves_data", "least", "most"), [(True, 1e-6, 50e-6), (False, 5e-3, 5e-3)]
)
def test_naps_stay_short_while_looks_move_data(moves_data, least, most, monkeypatch):
    monkeypatch.setattr(module, "EAGER", 0)
    now, naps = [0.0], []

    def nap(seconds):
        naps.append(seconds)
        now[0] += 1

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=nap)
    monkeypatch.setattr(module, "time", clock)
    looks = iter([None] * 30 + ["found"])
    Deadline(100.0, "call").wait(lambda: next(looks), str, moves_data=moves_data)

    assert least <= naps[-1] <= most


def test_no_nap_passes_the_limit(monkeypatch):
    monkeypatch.setattr(module, "EAGER", 0)
    monkeypatch.setattr(module, "nap_after", lambda waited: 5.0)
    begun = time.monotonic()
    with pytest.raises(hpc.WaitTimeoutError):
        Deadline(0.01, "call").wait(never, str)

    assert time.monotonic() - begun < 5


def test_error_of_the_look_comes_through():
    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError):
        Deadline(None, "call").wait(broken, lambda: "rain")


def test_block_takes_a_free_lock_at_once():
    lock = threading.Lock()

    assert Deadline(0, "call").block(
        lambda seconds: lock.acquire(timeout=seconds) or None, lambda: "the lock"
    )
    assert lock.locked()


def test_block_ends_when_the_time_is_over():
    lock, spans = threading.Lock(), []
    lock.acquire()

    def attempt(seconds):
        spans.append(seconds)
        return lock.acquire(timeout=seconds) or None

    deadline = Deadline(0.05, "call")
    with pytest.raises(hpc.WaitTimeoutError, match=r"call: waited .* s for the lock"):
        deadline.block(attempt, lambda: "the lock")
    assert spans[0] == 0
    assert 0.05 <= deadline.elapsed < WAIT
    # It sleeps until the limit, and does not poll.
    assert len(spans) < 5


def test_block_warns_while_it_waits(monkeypatch, caplog):
    monkeypatch.setattr(module, "FIRST_WARNING", 0.01)
    lock = threading.Lock()
    lock.acquire()
    with (
        caplog.at_level(logging.WARNING, "hpcaccum"),
        pytest.raises(hpc.WaitTimeoutError),
    ):
        Deadline(0.15, "call").block(
            lambda seconds: lock.acquire(timeout=seconds) or None, lambda: "the lock"
        )

    assert 1 <= len(caplog.messages) <= 5
    assert caplog.messages[0].endswith(" s for the lock")


def test_block_looks_four_times_a_second(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WARNING", math.inf)
    spans = []

    def attempt(seconds):
        spans.append(seconds)
        return len(spans) == 2 or None

    assert Deadline(math.inf, "call").block(attempt, str)
    assert spans == [0, 0.25]


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


def test_a_short_wait_takes_time_too():
    results = iter([None, "found"])
    deadline = Deadline(WAIT, "call")
    deadline.wait(lambda: next(results), str)

    assert deadline.waited > 0


def test_name_of_a_call_is_formatted_for_messages_only():
    class Call:
        def __str__(self):
            names.append("asked")
            return "call 7"

    names = []
    deadline = Deadline(0, Call())
    deadline.wait(lambda: 1, str)
    assert not names

    with pytest.raises(hpc.WaitTimeoutError, match=r"^call 7: waited"):
        deadline.wait(never, lambda: "rain")


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

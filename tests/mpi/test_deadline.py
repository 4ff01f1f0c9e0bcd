"""Deadlines: waits that end, and are not silent."""

from __future__ import annotations

import logging
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import deadline as module
from hpcaccum.deadline import Deadline

from .support import WAIT


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
    deadline = Deadline(0.01, "call")
    monkeypatch.setattr(deadline, "_nap", lambda polls: 0.02)
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
    with pytest.raises(hpc.InvalidArgumentError, match="HPCACCUM_TIMEOUT must be sec"):
        Deadline(None, "call")


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_timeout_is_not_negative(timeout):
    with pytest.raises(hpc.InvalidArgumentError, match="timeout must be at least 0 s"):
        Deadline(timeout, "call")


@pytest.mark.parametrize("timeout", ["1", [1], True, 1j])
def test_timeout_is_a_number(timeout):
    with pytest.raises(TypeError, match="timeout must be seconds or None"):
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
    assert caplog.messages[0].startswith("call: waited 0.0")
    assert caplog.messages[0].endswith(" s for rain")
    assert all(r.name == "hpcaccum" for r in caplog.records)


def test_first_warning_comes_after_a_minute():
    assert module.FIRST_WARNING == 60


def test_naps_grow_and_never_pass_the_limit():
    free, bound = Deadline(1e6, "free"), Deadline(0.0005, "bound")
    naps = [free._nap(polls) for polls in range(0, 5000, 10)]

    assert naps == sorted(naps)
    assert 0 < naps[0] < naps[-1]
    assert naps[-1] == module._LONGEST_NAP <= 1e-3
    assert bound._nap(10**9) <= 0.0005


def watch_naps(monkeypatch):
    """Return a list to which naps are added instead of being taken."""
    naps = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=naps.append)
    monkeypatch.setattr(module, "time", clock)
    return naps


def test_what_comes_at_once_is_not_slept_for(monkeypatch):
    monkeypatch.setattr(module, "_EAGER", WAIT)
    naps = watch_naps(monkeypatch)
    looks = iter([None] * 100 + ["found"])

    assert Deadline(WAIT, "call").wait(lambda: next(looks), str) == "found"
    assert not naps


def test_what_takes_long_does_not_keep_the_core(monkeypatch):
    monkeypatch.setattr(module, "_EAGER", 0)
    naps = watch_naps(monkeypatch)
    looks = iter([None] * 100 + ["found"])

    assert Deadline(WAIT, "call").wait(lambda: next(looks), str) == "found"
    assert len(naps) == 100


def test_error_of_the_look_comes_through():
    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError):
        Deadline(None, "call").wait(broken, lambda: "rain")

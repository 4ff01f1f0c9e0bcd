"""Traces: which methods are replaced, what is recorded, how rows are made."""

from __future__ import annotations

import operator
import sys
import threading
from types import SimpleNamespace

import pytest

import hpcaccum as hpc
from hpcaccum import deadline
from hpcaccum.deadline import Deadline
from hpcaccum.spans import MARKED, Event, Label, Recorder, recorded_by
from hpcaccum.tracing import Offset, common_time, lanes

from ..common import WAIT


def methods():
    names = {f.__qualname__: sys.modules[f.__module__] for f, *_ in MARKED}
    return {each: operator.attrgetter(each)(module) for each, module in names.items()}


@pytest.fixture
def recorder():
    recorder = Recorder()
    with recorded_by(recorder):
        yield recorder


def spans(recorder, thread=""):
    return recorder.rows()[thread]


def test_without_a_trace_the_methods_are_the_original_ones():
    before = methods()
    with recorded_by(Recorder()):
        during = methods()
    with pytest.raises(KeyError), recorded_by(Recorder()):
        raise KeyError
    after = methods()

    assert all(during[name] is not before[name] for name in before)
    assert all(during[name].__wrapped__ is before[name] for name in before)
    assert all(after[name] is before[name] for name in before)


def test_a_wait_has_its_call_and_what_was_missing_last(recorder, monkeypatch):
    looks = []

    def now():
        # A second passes between two looks.
        return float(len(looks))

    monkeypatch.setattr(deadline, "clock", now)
    clock = SimpleNamespace(monotonic=now, sleep=lambda seconds: None)
    monkeypatch.setattr(deadline, "time", clock)
    Deadline(WAIT, "call").wait(
        lambda: looks.append(None) or (len(looks) == 11 or None),
        lambda: f"look {len(looks)}",
    )
    (event,) = spans(recorder)

    # Asked again whenever the wait was twice as long.
    assert event == (
        ("wait", "Deadline.wait"),
        1.0,
        11.0,
        {"call": "call", "for": "look 9"},
    )


def test_a_wait_that_blocks_asks_while_it_waits(recorder):
    lock, asked = threading.Lock(), []
    lock.acquire()

    def missing():
        asked.append(None)
        if len(asked) == 2:
            lock.release()
        return "the lock"

    Deadline(WAIT, "call").block(
        lambda seconds: lock.acquire(timeout=seconds) or None, missing
    )
    (event,) = spans(recorder)

    assert event.label == ("wait", "Deadline.wait")
    assert event.args == {"call": "call", "for": "the lock"}


def test_a_wait_goes_on_if_what_is_missing_is_unknown(recorder):
    asked = []

    def missing():
        asked.append(None)
        return {}["missing"]

    Deadline(WAIT, "call").wait(lambda: bool(asked) or None, missing)
    (event,) = spans(recorder)

    assert event.args["for"] == "unknown (KeyError)"


def test_a_call_that_fails_shows_its_error(recorder):
    variable = hpc.Variable([0.0], "w")
    with pytest.raises(ZeroDivisionError):
        hpc.SGD(1.0).minimize(lambda: 1 / 0, var_list=[variable])
    (event,) = spans(recorder)

    assert event.label.name == "compute"
    assert event.args == {"error": "ZeroDivisionError"}


def event(begin, end):
    return Event(Label(f"{begin}-{end}", ""), begin, end, None)


def test_lanes():
    nested = [event(0, 10), event(0, 4), event(1, 3), event(4, 10), event(10, 11)]
    overlapping = [event(2, 12), event(5, 6)]

    assert lanes(nested[::-1]) == [nested]
    assert lanes(nested + overlapping) == [
        [*nested[:4], overlapping[1], nested[4]],
        overlapping[:1],
    ]
    assert lanes([]) == [[]]


def test_times_of_another_clock():
    before, after = Offset(100.0, 7.0, 0.0), Offset(200.0, 8.0, 0.0)

    assert common_time(100.0, before, after) == 107.0
    assert common_time(150.0, before, after) == 157.5
    assert common_time(200.0, before, after) == 208.0

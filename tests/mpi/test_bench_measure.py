"""The machinery of ``hpcaccum bench``: verifying, sampling in turns, statistics."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from hpcaccum import Group
from hpcaccum.bench.measure import (
    Kind,
    Measurement,
    Times,
    WrongAnswerError,
    apart,
    check_equal,
    repeated,
    rows,
    settled,
)


def case(*kinds):
    return SimpleNamespace(kinds=list(kinds), forget=lambda: None, free=lambda: None)


def constant(name, seconds, **more):
    return Kind(name, lambda inner: [seconds], **more)


def measure(comm, *kinds, seconds=0.01):
    return Measurement(Group.of(comm), "bench", case(*kinds), seconds)()


def test_statistics_are_those_of_numpy():
    samples = np.random.default_rng(0).exponential(size=1000).tolist()
    times = Times.of(samples)

    assert times.samples == 1000
    assert (times.min, times.max) == (min(samples), max(samples))
    assert times.median == np.median(samples)
    assert times.p99 == np.percentile(samples, 99)
    assert times.spread == np.subtract(*np.percentile(samples, [75, 25]))


def test_few_samples_have_no_99th_percentile():
    assert Times.of([1.0] * 99).p99 is None
    assert Times.of([1.0] * 100).p99 == 1.0


def test_statistics_are_over_all_ranks(comm, rank, size):
    times = measure(comm, constant("x", 1.0 + rank))["x"]

    assert (times.min, times.max) == (1.0, size)
    assert times.median == (1.0 + size) / 2
    assert times.samples % size == 0


def test_a_rank_may_only_help(comm, rank):
    kind = Kind("x", lambda inner: [2.0] if rank == 0 else [])

    assert measure(comm, kind)["x"].median == 2.0


def test_settled_times_end_the_measurement(comm):
    assert measure(comm, constant("x", 1e-3), seconds=1e9)["x"].samples < 100


def test_unsettled_times_are_measured_until_the_time_is_over(
    comm, rank, size, monkeypatch
):
    # Twice as long each time, on one rank only: all ranks go on. A call takes 1 s.
    calls = []

    def run(inner):
        calls.append(inner)
        return [1.0 if rank else 2.0 ** len(calls)]

    monkeypatch.setattr("time.perf_counter", lambda: float(len(calls)))
    times = measure(comm, Kind("x", run), seconds=50.0)["x"]

    assert len(calls) == 2 + 50
    assert times.samples == 25 * size  # each after one that warms up


def test_settled():
    assert settled([1.0, 1.01] * 5)
    assert not settled([1.0] * 9)
    assert not settled([1.0] * 5 + [1.1] * 5)
    assert settled([])


def test_short_operations_are_repeated(comm):
    inners = []

    def run(inner):
        inners.append(inner)
        return [3e-6]

    measure(comm, Kind("x", run))

    assert set(inners) == {1, 67}  # 200 us


def test_kinds_take_turns_in_changing_order(comm):
    names = []

    def kind(name):
        def run(inner):
            names.append(name)
            return [1.0]

        return Kind(name, run)

    measure(comm, kind("a"), kind("b"), seconds=1e-9)

    # Verified and tried, then three rounds, each time with one to warm up.
    assert "".join(names) == "aabb" + "bbaa" + "aabb" + "bbaa"


def test_a_wrong_answer_is_an_error_on_every_rank(comm, rank, size):
    wrong = size - 1
    ran = []

    def check():
        check_equal(np.array([1.0, 2.0]), [1.0, 3.0] if rank == wrong else [1.0, 2.0])

    def run(inner):
        ran.append(inner)
        return [1.0]

    expected = WrongAnswerError if rank == wrong else RuntimeError
    with pytest.raises(expected, match="1 of 2 elements are wrong: number 1 is 2"):
        measure(comm, Kind("x", run, check))

    assert ran == [1]  # nothing was timed


def test_answers_are_forgotten_before_each_is_verified(comm):
    group, calls = Group.of(comm), []
    forgetful = SimpleNamespace(
        kinds=[
            Kind("a", lambda inner: calls.append("a") or [1.0]),
            Kind("b", lambda inner: calls.append("b") or [1.0]),
        ],
        forget=lambda: calls.append("forget"),
    )
    Measurement(group, "bench", forgetful, 1e-9)()

    assert calls[:6] == ["forget", "a", "a", "forget", "b", "b"]


def test_nothing_equals_nan():
    with pytest.raises(WrongAnswerError, match="3 of 3"):
        check_equal(np.full(3, np.nan), np.full(3, np.nan))


def test_repeated_and_apart_run_so_often():
    calls = []
    repeated(lambda: calls.append("x"))(3)
    apart(*(lambda c=c: calls.append(c) for c in "abc"))(2)

    assert "".join(calls) == "xxxabcabc"


def test_apart_leaves_out_what_surrounds():
    clock = SimpleNamespace(now=0.0)

    def passes(seconds):
        def operation():
            clock.now += seconds

        return operation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: clock.now)
        seconds = apart(passes(100.0), passes(1.0), passes(10.0))(4)

    assert seconds == [1.0]


def test_rows():
    # 8 bytes, 4 ranks: copies move 2 * 8 * 4 bytes in 1 us.
    kinds = [
        constant("ours", 0, raw="raw", moves=128.0, bus=1.5),
        constant("raw", 0, reference=True),
        constant("copy", 0, reference=True, moves=64.0),
        constant("late", 0, bus=0, figures=lambda m: {"twice": 2 * m["late"]}),
    ]
    medians = {"ours": 4e-6, "raw": 6e-6, "copy": 1e-6, "late": 3.0}
    times = {
        name: Times(5, t / 2, t, 2 * t, 3 * t, t / 4) for name, t in medians.items()
    }
    ours, raw, copy, late = rows("x", 8, 4, kinds, times)

    assert (ours.benchmark, ours.name, ours.bytes, ours.samples) == ("x", "ours", 8, 5)
    assert np.allclose(
        [ours.min_us, ours.median_us, ours.p99_us, ours.max_us, ours.spread_us],
        [2, 4, 8, 12, 1],
    )
    assert math.isclose(ours.algbw, 0.002)
    assert math.isclose(ours.busbw, 0.003)
    assert math.isclose(ours.vs_mpi, 1.5)
    assert math.isclose(ours.floor_us, 2.0)
    assert math.isclose(ours.vs_floor, 2.0)
    assert not ours.reference
    assert (raw.vs_mpi, raw.vs_floor, raw.floor_us) == (None, None, None)
    assert raw.reference
    assert math.isclose(copy.vs_floor, 1.0)
    assert (late.algbw, late.busbw, late.figures) == (None, None, {"twice": 6.0})

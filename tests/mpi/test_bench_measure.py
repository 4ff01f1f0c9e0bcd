"""The machinery of ``hpcaccum bench``: verifying, sampling in turns, statistics."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hpcaccum import group_of
from hpcaccum.bench.measure import (
    Kind,
    WrongAnswerError,
    apart,
    check_equal,
    measure,
    repeated,
    rows,
)

pytestmark = pytest.mark.any_size


def constant(name, seconds, **more):
    return Kind(name, lambda inner: [seconds], **more)


def samples(comm, *kinds, seconds=0.01, forget=lambda: None):
    case = SimpleNamespace(group=group_of(comm), kinds=kinds, forget=forget)
    return measure(case, "bench", seconds)


def row(seconds):
    """The row of some samples."""
    case = SimpleNamespace(nbytes=8, kinds=[constant("x", 0)])
    [found] = rows("bench", case, {"x": seconds})
    return found


def test_statistics_are_those_of_numpy():
    seconds = np.random.default_rng(0).exponential(size=1000)
    times = row(seconds.tolist())

    assert times.samples == 1000
    shown = [times.min_us, times.median_us, times.p99_us, times.max_us]
    expected = 1e6 * np.percentile(seconds, [0, 50, 99, 100])
    assert shown == pytest.approx(expected)
    quartiles = np.percentile(seconds, [75, 25])
    assert times.spread_us == pytest.approx(1e6 * np.subtract(*quartiles))


def test_few_samples_have_no_99th_percentile():
    assert row([1.0] * 99).p99_us is None
    assert row([1.0] * 100).p99_us == 1e6


def test_samples_are_those_of_all_ranks(comm, rank, size):
    found = samples(comm, constant("x", 1.0 + rank))["x"]

    assert set(found) == {1.0 + each for each in range(size)}


def test_a_rank_may_only_help(comm, rank):
    kind = Kind("x", lambda inner: [2.0] if rank == 0 else [])

    assert set(samples(comm, kind)["x"]) == {2.0}


def test_turns_are_taken_until_the_time_of_rank_0_is_over(
    comm, rank, size, monkeypatch
):
    # A call takes 1 s on rank 0, none on the others.
    calls = []

    def run(inner):
        calls.append(inner)
        return [1.0]

    now = (lambda: float(len(calls))) if rank == 0 else (lambda: 0.0)
    monkeypatch.setattr("time.perf_counter", now)
    found = samples(comm, Kind("x", run), seconds=50.0)["x"]

    assert len(calls) == 2 + 50
    assert len(found) == 25 * size  # each after one that warms up


def test_short_operations_are_repeated(comm):
    inners = []

    def run(inner):
        inners.append(inner)
        return [3e-6]

    samples(comm, Kind("x", run))

    assert set(inners) == {1, 67}  # 200 us


def test_kinds_take_turns_in_changing_order(comm):
    names = []

    def kind(name):
        def run(inner):
            names.append(name)
            return [1.0]

        return Kind(name, run)

    samples(comm, kind("a"), kind("b"), seconds=1e-9)

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
        samples(comm, Kind("x", run, check))

    assert ran == [1]  # nothing was timed


def test_answers_are_forgotten_before_each_is_verified(comm):
    calls = []
    kinds = [
        Kind(name, lambda inner, name=name: calls.append(name) or [1.0])
        for name in "ab"
    ]
    samples(comm, *kinds, seconds=1e-9, forget=lambda: calls.append("forget"))

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
    kinds = [
        constant("ours", 0, raw="raw", floor=("copy", 2.0), bus=1.5),
        constant("raw", 0, reference=True),
        constant("copy", 0, reference=True, floor=("copy", 1.0)),
        constant("late", 0, bus=0, figures=lambda m: {"twice": 2 * m["late"]}),
    ]
    case = SimpleNamespace(nbytes=8, kinds=kinds)
    medians = {"ours": 4e-6, "raw": 6e-6, "copy": 1e-6, "late": 3.0}
    found = {name: [t / 2, t, 3 * t] for name, t in medians.items()}
    ours, raw, copy, late = rows("x", case, found)

    assert (ours.benchmark, ours.name, ours.bytes, ours.samples) == ("x", "ours", 8, 3)
    times = [ours.min_us, ours.median_us, ours.max_us, ours.spread_us]
    assert times == pytest.approx([2, 4, 12, 5])
    assert ours.algbw == pytest.approx(0.002)
    assert ours.busbw == pytest.approx(0.003)
    assert ours.vs_mpi == pytest.approx(1.5)
    assert ours.floor_us == pytest.approx(2.0)
    assert ours.vs_floor == pytest.approx(2.0)
    assert not ours.reference
    assert (raw.vs_mpi, raw.vs_floor, raw.floor_us) == (None, None, None)
    assert raw.reference
    assert copy.vs_floor == pytest.approx(1.0)
    assert (late.algbw, late.busbw, late.figures) == (None, None, {"twice": 6.0})

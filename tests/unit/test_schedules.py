"""Schedules: which is chosen, and how a buffer is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccum import InvalidArgumentError, Layout
from hpcaccum.reducer import selection
from hpcaccum.reducer.schedule import Case, Readiness, cut
from hpcaccum.reducer.two_shot import stripe

KIB = 1 << 10
ONE = Case(4, 1, 1, KIB, None, None, cuda_aware=False)
SEVERAL = ONE._replace(nodes=2)
SINGLES = ONE._replace(nodes=4)
LARGE = {"nbytes": 512 * KIB}
WIRE = {"wire_dtype": np.dtype(np.float16)}


@pytest.mark.parametrize(
    ("schedule", "case", "expected"),
    [
        ("auto", ONE, "OneShot"),
        ("auto", ONE._replace(nbytes=32 * KIB), "OneShot"),
        ("auto", ONE._replace(nbytes=33 * KIB), "TwoShot"),
        ("auto", ONE._replace(bucket_bytes=KIB), "TwoShot"),
        ("auto", ONE._replace(**WIRE), "OneShot"),
        ("auto", SEVERAL, "SmallFlat"),
        ("auto", SEVERAL._replace(nbytes=65 * KIB), "Flat"),
        ("auto", SEVERAL._replace(nbytes=2 * KIB, bucket_bytes=KIB), "Flat"),
        ("auto", SEVERAL._replace(**LARGE), "Hierarchical"),
        ("auto", SEVERAL._replace(**WIRE), "Hierarchical"),
        ("auto", SINGLES._replace(**LARGE), "Flat"),
        ("auto", SINGLES._replace(**LARGE, **WIRE), "Hierarchical"),
        ("shared", ONE, "OneShot"),
        ("shared", ONE._replace(**LARGE), "TwoShot"),
        ("hierarchical", ONE, "OneShot"),
        ("hierarchical", ONE._replace(**LARGE, **WIRE), "TwoShot"),
        ("hierarchical", SEVERAL, "Hierarchical"),
        ("hierarchical", SINGLES, "Hierarchical"),
        ("flat", ONE, "SmallFlat"),
        ("flat", SEVERAL._replace(**LARGE), "Flat"),
        ("flat", ONE._replace(cuda_aware=True), "Blocking"),
        ("nccl", ONE._replace(**LARGE), "Nccl"),
    ],
    ids=str,
)
def test_choice(schedule, case, expected):
    assert selection.choose(schedule, case).__name__ == expected


def test_shared_memory_needs_one_node():
    with pytest.raises(
        InvalidArgumentError, match=r"'shared' needs all ranks on one node, .* on 4"
    ):
        selection.choose("shared", SINGLES)
    with pytest.raises(InvalidArgumentError, match=r"'nccl' needs all ranks on one"):
        selection.choose("nccl", SEVERAL)


# Buckets and stripes


@given(st.integers(0, 5000), st.integers(1, 700))
def test_buckets_are_cut_from_the_end_and_leave_nothing_out(size, most):
    buckets = cut(size, most)

    assert [n for b in reversed(buckets) for n in range(b.start, b.stop)] == [
        *range(size)
    ]
    assert all(0 < b.stop - b.start <= most for b in buckets)
    assert all(b.stop - b.start == most for b in buckets[:-1])


@given(st.integers(0, 40), st.integers(0, 600), st.integers(1, 9))
def test_stripes_begin_on_cache_lines_and_leave_nothing_out(first, length, parts):
    bucket = slice(16 * first, 16 * first + length)
    stripes = [stripe(bucket, part, parts, 4) for part in range(parts)]
    covered = [n for s in stripes for n in range(s.start, s.stop)]

    assert covered == [*range(bucket.start, bucket.stop)]
    assert all(s.start % 16 == 0 for s in stripes if s.start < s.stop)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.randoms())
def test_buckets_are_ready_when_all_their_arrays_are(lengths, chance):
    layout = Layout({str(n): (length,) for n, length in enumerate(lengths)}, "float32")
    buckets = cut(layout.size, 32)
    readiness, added = Readiness(layout, buckets), set()
    for _ in range(2):
        names = list(layout)
        chance.shuffle(names)
        added.clear()
        for name in names:
            added.add(name)
            missing = [
                any(inside not in added for inside, _, _ in layout.overlaps(bucket))
                for bucket in buckets
            ]
            assert readiness.add(name) == [*missing, True].index(True)
        readiness.reset()

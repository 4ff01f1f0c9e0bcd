"""Buckets and stripes: the pieces into which schedules cut a buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcaccum import Layout
from hpcaccum.reducer.schedule import Readiness, cut
from hpcaccum.reducer.two_shot import stripe


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

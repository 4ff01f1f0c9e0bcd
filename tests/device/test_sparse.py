"""kernels/sparse.cu: rows added where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import (
    ACCEPTED,
    COUNT,
    DROPPED,
    DTYPES,
    STEP,
    TICKET,
    Watched,
    header,
    i64,
    lags,
    launch,
    normal,
    numbers,
)

ROWS = 17
WIDE = pytest.mark.parametrize("kind", ["f32", "f64"])


class Table:
    """A sum of rows, with what counts them."""

    def __init__(self, kind, width, step=0):
        self.kind, self.width = kind, width
        self.sum = Watched(np.zeros((ROWS, width), DTYPES[kind]))
        self.counts = Watched(np.zeros(ROWS, np.int32))
        self.refused, self.met = Watched(i64([0])), Watched(i64([-1]))
        self.header = header(step)

    def scatter(self, values, rows, local_step=0, head=True, blocks=3):
        launch(
            f"scatter_add_rows_{self.kind}",
            *(self.sum, self.counts, Watched(values), Watched(i64(rows))),
            *(i64(len(rows)), i64(self.width), i64(ROWS)),
            *(self.header if head else None, i64(local_step), self.met, self.refused),
            blocks=blocks,
        )

    def mean(self, head=True, blocks=3):
        sizes = (i64(ROWS), i64(self.width))
        more = (self.header if head else None,)
        name = f"mean_rows_{self.kind}"
        launch(name, self.sum, self.counts, *sizes, *more, blocks=blocks)


def values_of(k, width, kind):
    return numbers(k * width, DTYPES[kind]).reshape(k, width)


@WIDE
@pytest.mark.parametrize("width", [0, 1, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_are_added_and_counted_where_they_belong(kind, width, blocks):
    rows = np.random.default_rng(width).integers(0, ROWS, 60)
    values = values_of(60, width, kind)
    table = Table(kind, width)
    table.scatter(values, rows, blocks=blocks)

    expected = np.zeros((ROWS, width))
    np.add.at(expected, rows, values)
    np.testing.assert_array_equal(table.sum.get(), expected)
    np.testing.assert_array_equal(table.counts.get(), np.bincount(rows, None, ROWS))
    assert table.refused.get().tolist() == [0]
    words = table.header.get()
    assert words[[COUNT, ACCEPTED, TICKET]].tolist() == [1, 1, 0]
    assert table.met.get().tolist() == [0]


@WIDE
def test_rows_outside_are_refused_and_counted(kind):
    rows = [-1, 0, ROWS - 1, ROWS, 2**62, -(2**62), 3]
    values = values_of(7, 40, kind)
    table = Table(kind, 40)
    table.scatter(values, rows)

    inside = [1, 2, 6]
    expected = np.zeros((ROWS, 40))
    expected[[0, ROWS - 1, 3]] = values[inside]
    np.testing.assert_array_equal(table.sum.get(), expected)
    assert table.counts.get().sum() == 3
    assert table.refused.get().tolist() == [4]


@WIDE
def test_no_rows_are_a_gradient_too(kind):
    table = Table(kind, 5)
    table.scatter(np.zeros((0, 5), DTYPES[kind]), [])

    assert not table.sum.get().any()
    assert table.header.get()[[COUNT, ACCEPTED]].tolist() == [1, 1]


@WIDE
def test_stale_rows_change_nothing_but_what_counts_them(kind):
    table = Table(kind, 5, step=3)
    table.scatter(values_of(2, 5, kind), [1, 99], local_step=1)

    assert not table.sum.get().any()
    assert not table.counts.get().any()
    assert table.refused.get().tolist() == [0]
    words = table.header.get()
    assert words[[STEP, COUNT, ACCEPTED, DROPPED]].tolist() == [3, 0, 0, 1]
    assert lags(words) == {2: 1}
    assert table.met.get().tolist() == [3]


@WIDE
def test_later_gradients_are_added_to_the_first(kind):
    table, values = Table(kind, 8), values_of(2, 8, kind)
    table.scatter(values, [4, 5])
    table.scatter(values, [4, 6])

    expected = np.zeros((ROWS, 8))
    expected[[4, 5, 6]] = 2 * values[0], values[1], values[1]
    np.testing.assert_array_equal(table.sum.get(), expected)
    assert table.header.get()[COUNT] == 2


def test_without_a_header_rows_are_always_added():
    table, values = Table("f32", 3), values_of(1, 3, "f32")
    table.scatter(values, [2], local_step=-9, head=False)

    np.testing.assert_array_equal(table.sum.get()[2], values[0])


@WIDE
@pytest.mark.parametrize("width", [0, 1, 33, 300])
@pytest.mark.parametrize("blocks", [1, 3])
def test_mean_rows_divides_each_row_by_its_count(kind, width, blocks):
    table = Table(kind, width, step=5)
    total = normal(ROWS * width, DTYPES[kind]).reshape(ROWS, width)
    counts = np.arange(ROWS, dtype=np.int32) % 4
    table.sum, table.counts = Watched(total), Watched(counts)
    table.mean(blocks=blocks)

    divisors = np.maximum(counts, 1).astype(DTYPES[kind])
    np.testing.assert_array_equal(table.sum.get(), total / divisors[:, None])
    np.testing.assert_array_equal(table.counts.get(), counts)
    assert table.header.get()[[STEP, COUNT, TICKET]].tolist() == [6, 0, 0]


def test_mean_rows_needs_no_header():
    table = Table("f32", 4)
    table.sum = Watched(np.full((ROWS, 4), 6, "f4"))
    table.counts = Watched(np.full(ROWS, 3, np.int32))
    table.mean(head=False)

    np.testing.assert_array_equal(table.sum.get(), 2)

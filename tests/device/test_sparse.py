"""kernels/sparse.cu: rows added where they belong."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from hpcaccum.device import kernels

from .launching import DTYPES, Watched, forget_kernels, i64, launch, normal, numbers

ROWS = 17
WIDE = pytest.mark.parametrize("kind", ["f32", "f64"])


class Table:
    """A sum of rows, with the weights of their contributions."""

    def __init__(self, kind, width):
        self.kind, self.width = kind, width
        self.sum = Watched(np.zeros((ROWS, width), DTYPES[kind]))
        self.weights = Watched(np.zeros(ROWS, DTYPES[kind]))
        self.refused = Watched(i64([0]))

    def scatter(self, values, rows, blocks=3, weight=1):
        launch(
            f"scatter_add_rows_{self.kind}",
            *(self.sum, self.weights, Watched(values), Watched(i64(rows))),
            *(i64(len(rows)), i64(self.width), i64(ROWS)),
            *(DTYPES[self.kind].type(weight), self.refused),
            blocks=blocks,
        )

    def mean(self, blocks=3):
        sizes = (i64(ROWS), i64(self.width))
        name = f"mean_rows_{self.kind}"
        launch(name, self.sum, self.weights, *sizes, blocks=blocks)


@contextlib.contextmanager
def groups_of(number):
    """Make the kernels process so many elements together instead of four billion."""
    whole = kernels.source

    def changed(file):
        text = whole(file)
        if file == "sparse.cu":
            assert "0xffffffffll" in text
            text = text.replace("0xffffffffll", f"{number}ll")
        return text

    forget_kernels()
    kernels.source = changed
    try:
        yield
    finally:
        kernels.source = whole
        forget_kernels()


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
    np.testing.assert_array_equal(table.weights.get(), np.bincount(rows, None, ROWS))
    assert table.refused.get().tolist() == [0]


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
    assert table.weights.get().sum() == 3
    assert table.refused.get().tolist() == [4]


@WIDE
def test_later_gradients_are_added_to_the_first(kind):
    table, values = Table(kind, 8), values_of(2, 8, kind)
    table.scatter(values, [4, 5])
    table.scatter(values, [4, 6], weight=0.5)

    expected = np.zeros((ROWS, 8))
    expected[[4, 5, 6]] = 1.5 * values[0], values[1], values[1] / 2
    np.testing.assert_array_equal(table.sum.get(), expected)
    assert table.weights.get()[4:7].tolist() == [1.5, 1, 0.5]


@WIDE
@pytest.mark.parametrize("width", [0, 1, 33, 300])
@pytest.mark.parametrize("blocks", [1, 3])
def test_mean_rows_divides_each_row_by_its_weight(kind, width, blocks):
    table = Table(kind, width)
    total = normal(ROWS * width, DTYPES[kind]).reshape(ROWS, width)
    weights = (np.arange(ROWS) % 4 / 2).astype(DTYPES[kind])
    table.sum, table.weights = Watched(total), Watched(weights)
    table.mean(blocks=blocks)

    divisors = np.where(weights, weights, 1)
    np.testing.assert_array_equal(table.sum.get(), total / divisors[:, None])
    np.testing.assert_array_equal(table.weights.get(), weights)


@WIDE
@pytest.mark.parametrize("width", [1, 33, 128])
def test_large_matrices_are_processed_in_groups_of_rows(kind, width):
    with groups_of(100):
        test_rows_are_added_and_counted_where_they_belong(kind, width, 3)
        test_mean_rows_divides_each_row_by_its_weight(kind, width, 3)

"""IndexedSlices: what it accepts, its array; sums of rows, against numpy.add.at."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcaccum as hpc
from hpcaccum.rows import Rows, check_indices, merged
from hpcaccum.rows import sums as module
from hpcaccum.rows.sums import add_at, distinct

from ..common import same_bits

INVALID = hpc.InvalidArgumentError


def test_arguments_have_the_order_of_tensorflow():
    values = np.ones((2, 3), "f2")
    slices = hpc.IndexedSlices(values, [4, 1], (5, 3))

    assert slices.values is values
    same_bits(slices.indices, np.array([4, 1]))
    assert slices.dense_shape == (5, 3)
    assert hpc.IndexedSlices([1, 2], [0, 0]).dense_shape is None
    assert repr(slices) == "<IndexedSlices: 2 rows of (5, 3), float16 (2, 3)>"


@pytest.mark.parametrize(
    "indices",
    [[3, 0], (3.9, -0.5), np.array([3, 0], np.uint64), np.array([3, 0], np.int8)],
)
def test_indices_become_integers_of_64_bits(indices):
    same_bits(hpc.IndexedSlices([1, 2], indices).indices, np.array([3, 0]))


def test_no_indices_at_all():
    slices = hpc.IndexedSlices(np.ones((0, 2)), [], np.array([4, 2], "i4"))

    assert (slices.indices.dtype, slices.indices.shape) == (np.int64, (0,))
    same_bits(slices.to_dense(), np.zeros((4, 2)))


@pytest.mark.parametrize(
    ("values", "indices", "text"),
    [
        ([1], 0, r"indices must be a vector, got an array of shape \(\)"),
        ([1], [[0]], "indices must be a vector"),
        ([1], None, "indices must be an array of real numbers, got dtype object"),
        ([1], ["1"], "indices must be an array of real numbers"),
        ([1], [np.nan], "indices must be integers of 64 bits"),
        ([1], [1e19], "indices must be integers of 64 bits"),
        ([1], np.array([2**64 - 1], np.uint64), "indices must be integers of 64 bits"),
        ([[1], [1, 2]], [0, 1], "values are not an array"),
        ([1j], [0], "values must be an array of real numbers, got dtype complex128"),
        (np.ma.ones(1), [0], "values must have no mask, got a masked array"),
        ([1], np.ma.zeros(1, int), "indices must have no mask"),
        (3, [0], "values must have a row for each index, got a number"),
        ([[1, 2]], [0, 1], "values must have 2 rows, one for each index, got 1"),
    ],
)
def test_values_must_have_a_row_for_each_index(values, indices, text):
    with pytest.raises(INVALID, match=text):
        hpc.IndexedSlices(values, indices)


@pytest.mark.parametrize("shape", [3, "23", (2.0,), [None, 3]])
def test_dense_shape_consists_of_integers(shape):
    with pytest.raises(TypeError, match="dense_shape must be a list or a tuple"):
        hpc.IndexedSlices([1], [0], shape)


def test_array_has_the_sum_of_repeated_rows():
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 9, 40), rng.normal(size=(40, 2, 3))
    expected = np.zeros((9, 2, 3))
    np.add.at(expected, indices, values)

    same_bits(hpc.IndexedSlices(values, indices, (9, 2, 3)).to_dense(), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, bool])
def test_repeated_rows_are_added_in_the_dtype_of_the_array(dtype):
    slices = hpc.IndexedSlices(np.ones(2100, dtype), np.zeros(2100, int), (1,))
    same_bits(slices.to_dense("float32"), np.array([2100], "f4"))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (None, "cannot be converted to an array without dense_shape"),
        ((-1, 3), "cannot be converted to an array without a number of rows"),
        (
            (9, 2),
            r"values of shape \(2, 3\) are not rows of an array of shape \(9, 2\)",
        ),
        ((), "not rows of an array"),
        ((3, 3), r"indices must be in 0 to 2, got 5 \(1 of 2 are not\)"),
    ],
)
def test_array_needs_a_shape_that_fits(shape, text):
    slices = hpc.IndexedSlices(np.ones((2, 3)), [0, 5], shape)
    with pytest.raises(INVALID, match=text):
        slices.to_dense()


def test_indices_are_not_negative():
    with pytest.raises(INVALID, match=r"0 to 8, got -1 \(2 of 3 are not\)"):
        check_indices(np.array([-1, 8, 9]), 9)
    check_indices(np.array([0, 8]), 9)


# Sums


@pytest.fixture
def small(monkeypatch):
    """Chunks of two rows of three elements."""
    monkeypatch.setattr(module, "_CHUNK", 7)


def random_rows(number, width=3, rows=6, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(-2, rows, number), rng.normal(size=(number, width)).astype(
        dtype
    )


def dense(parts, dtype, width=3, rows=10):
    """Return the sum of all rows, those of -2 and on, by the plain line of NumPy."""
    total = np.full((rows, width), -0.0, dtype)
    for indices, values in parts:
        np.add.at(total, indices + 2, values.astype(dtype))
    return total


def check(found, parts, dtype, counts):
    union = np.unique(np.concatenate([indices for indices, _ in parts]))
    same_bits(found.indices, union)
    same_bits(found.values, dense(parts, dtype)[union + 2])
    same_bits(found.weights, counts[union + 2])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, "f4", "f8", "i8"])
@pytest.mark.parametrize("number", [0, 1, 2, 40])
def test_repeated_rows_of_one_gradient_are_added_in_order(small, dtype, number):
    wide = np.dtype("f8" if dtype in ("f8", "i8") else "f4")
    indices, values = random_rows(number, dtype=dtype)

    found = distinct(indices, values, wide)
    check(found, [(indices, values)], wide, np.ones(10))


def test_weights_of_sums_are_added():
    one, two = np.array([1, 4]), np.array([4, 9])
    parts = [Rows(one, np.array([2, 3]), np.ones((2, 1)))]
    parts.append(Rows(two, np.array([5, 1]), np.ones((2, 1))))

    assert merged(parts).weights.tolist() == [2, 8, 1]


@pytest.mark.parametrize("width", [0, 1, 3, 100])
@pytest.mark.parametrize("number", [0, 1, 2, 50])
def test_add_at_is_that_of_numpy(small, width, number):
    rng = np.random.default_rng(number)
    found = rng.normal(size=(5, width)).astype("f4")
    expected, places = found.copy(), rng.integers(0, 5, number)
    rows = rng.normal(size=(number, width))
    np.add.at(expected, places, rows.astype("f4"))

    add_at(found, places, rows)
    same_bits(found, expected)


@given(st.lists(st.lists(st.integers(-2, 7), max_size=8), min_size=1, max_size=5))
def test_any_rows_have_the_sums_of_a_dense_model(drawn):
    values = iter(2.0**k for k in range(1000))
    raw = [
        (
            np.array(each, np.int64),
            np.array([[next(values)] for _ in each]).reshape(-1, 1),
        )
        for each in drawn
    ]
    found = merged([distinct(*each, np.dtype("f8")) for each in raw])
    counts = np.zeros(10)
    for indices, _ in raw:
        counts[np.unique(indices) + 2] += 1

    union = np.flatnonzero(counts) - 2
    same_bits(found.indices, union)
    same_bits(found.weights, counts[union + 2])
    same_bits(found.values, dense(raw, "f8", 1)[union + 2])


def test_overflow_is_infinity_without_a_warning():
    indices, values = np.array([0, 0, 1]), np.array([[3e38], [3e38], [1e300]])
    with np.errstate(all="raise"):
        found = distinct(indices, values, np.dtype("f4"))
        large = Rows(indices[:1], indices[2:], np.full((1, 1), 3e38, "f4"))
        sums = merged([large, large])

    assert found.values.tolist() == [[np.inf], [np.inf]]
    assert sums.values.tolist() == [[np.inf]]

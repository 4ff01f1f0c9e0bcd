"""Sums of rows, against numpy.add.at."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccum.rows import Rows, merged, union_size
from hpcaccum.rows import sums as module
from hpcaccum.rows.sums import add_at, distinct

from ..common import same_bits


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


def test_rows_that_ascend_are_not_copied():
    values = np.ones((3, 2), np.float32)
    found = distinct(np.array([-1, 0, 7]), values, values.dtype)

    assert found.values is values
    assert found.weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_gradients_are_added_in_their_order_and_counted(small, number):
    raw = [random_rows(each * 7, seed=each) for each in range(number)]
    parts = [distinct(*each, np.dtype("f4")) for each in raw]
    counts = np.zeros(10)
    for part in parts:
        counts[part.indices + 2] += 1

    # Of sums, as rows of a gradient are added first.
    check(merged(parts), [(p.indices, p.values) for p in parts], np.float32, counts)


def test_weights_of_sums_are_added():
    one, two = np.array([1, 4]), np.array([4, 9])
    parts = [Rows(one, np.array([2, 3]), np.ones((2, 1)))]
    parts.append(Rows(two, np.array([5, 1]), np.ones((2, 1))))

    assert merged(parts).weights.tolist() == [2, 8, 1]
    assert union_size(one, two) == 3


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

"""IndexedSlices: what it accepts, and its array."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.rows import check_indices

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

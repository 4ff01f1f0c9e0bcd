"""Gradients on a device that are not finite: found by one launch and one copy."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.optimizers.finite import to_drop

BFLOAT16 = ml_dtypes.bfloat16
LARGEST = np.finfo("f4").max
FLOAT32 = np.dtype("f4")

# A gradient, the dtype of its variable, whether it is finite.
GRADIENTS = [
    *[
        (np.array([1, value, 1], dtype), dtype, False)
        for dtype in ("f2", BFLOAT16, "f4", "f8")
        for value in (np.nan, np.inf, -np.inf)
    ],
    # The largest numbers, whose sum is infinite.
    *[
        (np.full(300, ml_dtypes.finfo(dtype).max, dtype), dtype, True)
        for dtype in ("f2", BFLOAT16, "f4", "f8")
    ],
    # Half precision is exchanged in float32.
    (np.array([1e30, -7], "f4"), "f2", True),
    (np.array([1e30, -7], "f8"), BFLOAT16, True),
    (np.array([1e300, 1]), "f4", False),
    (np.array([-1e300, 1]), BFLOAT16, False),
    (np.array([LARGEST, -LARGEST], "f8"), "f4", True),
    (np.array([np.inf], "f2"), "f8", False),
    (np.zeros((0, 4), "f4"), "f4", True),
    (np.array(np.nan), "f8", False),
]
SLICES = [
    (np.array([3e38, 3e38], "f4"), [0, 0], False),
    (np.array([3e38, 3e38], "f4"), [0, 1], True),
    (np.array([3e38, 3e38, -3e38], "f4"), [0, 1, 0], True),
    (np.array([1e300]), [1], False),
    (np.array([[1, np.nan]], BFLOAT16), [1], False),
    (np.array([], "f4"), [], True),
]


@pytest.mark.parametrize(("gradient", "dtype", "finite"), GRADIENTS)
def test_the_dtype_in_which_it_is_exchanged_decides(gradient, dtype, finite):
    for place in np.asarray, cupy.asarray:
        given = [("w", place(gradient), np.dtype(dtype))]
        assert to_drop("it", given, "drop") is not finite
        assert not to_drop("it", given, "accept")


@pytest.mark.parametrize(("values", "rows", "finite"), SLICES)
def test_rows_are_added_first(values, rows, finite):
    for place in np.asarray, cupy.asarray:
        slices = hpc.IndexedSlices(place(values), rows)
        assert to_drop("it", [("w", slices, FLOAT32)], "drop") is not finite


def test_a_norm_is_that_of_arrays_in_both_places():
    arrays = [np.full(n, 0.5, "f4") for n in range(5)]
    places = [(cupy if n % 2 else np).asarray(each) for n, each in enumerate(arrays)]
    pairs = [(each, hpc.Variable(each, f"w{each.size}")) for each in places]
    clipped, norm = hpc.clip_by_global_norm(pairs, 100.0)

    assert norm == np.linalg.norm(np.concatenate(arrays))
    assert all(grad is each for (grad, _), each in zip(clipped, places, strict=True))


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4])
def test_the_first_that_is_not_finite_is_named(bad):
    def gradient(number):
        value = np.nan if number >= bad else 1.0
        array = np.full((2, 20000), value, "f4")
        # Some are on the device, some are rows.
        array = cupy.asarray(array) if number % 2 else array
        return hpc.IndexedSlices(array, [0, 1]) if number > 1 else array

    given = [(f"w{number}", gradient(number), FLOAT32) for number in range(4)]
    if bad == 4:
        assert not to_drop("it", given, "raise")
        return
    text = f"it: the gradient of 'w{bad}' has a NaN or an infinity in float32"
    with pytest.raises(hpc.InvalidArgumentError, match=text):
        to_drop("it", given, "raise")


def test_views_of_any_strides():
    """An adapter may pass such; those of PyTorch are refused later."""
    array = np.ones((40, 30), "f4")
    array[20, 12] = np.inf
    there = cupy.asarray(array)
    for view, finite in (
        (there.T, False),
        (there[::3], True),
        (there[::4, ::4], False),
    ):
        assert to_drop("it", [("w", view, FLOAT32)], "drop") is not finite


def test_work_on_the_current_stream_is_waited_for():
    grad = cupy.zeros(70000, "f4")
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        grad.fill(np.nan)
        assert to_drop("it", [("w", grad, FLOAT32)], "drop")

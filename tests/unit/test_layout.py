"""Layouts: where named arrays lie in one buffer."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpcaccum as hpc
from hpcaccum.dtypes import accumulation_dtype, float_dtype

SHAPES = {"w": (3, 4), "b": (5,), "none": (0, 7), "scalar": ()}


def test_arrays_follow_each_other_on_cache_lines():
    layout = hpc.Layout(SHAPES, "float64")

    assert layout.offsets == {"w": 0, "b": 16, "none": 24, "scalar": 24}
    assert (layout.size, layout.nbytes) == (32, 256)
    assert (list(layout), len(layout)) == (list(SHAPES), 4)
    assert repr(layout) == "Layout(4 arrays, 32 x float64)"


def test_views_are_parts_of_the_buffer():
    layout = hpc.Layout(SHAPES, "float32")
    buffer = np.zeros(layout.size, "float32")
    views = layout.views(buffer)
    for number, view in enumerate(views.values(), 1):
        view[...] = number

    assert {name: view.shape for name, view in views.items()} == SHAPES
    assert all(np.shares_memory(v, buffer) for v in views.values() if v.size)
    # 12 of w, 5 of b, 1 scalar; what lies between stays untouched.
    assert np.bincount(buffer.astype(int)).tolist() == [layout.size - 18, 12, 5, 0, 1]


@pytest.mark.parametrize(
    ("shapes", "kind", "message"),
    [
        ({"x": (-5,)}, hpc.InvalidArgumentError, r"'x' .*negative dimension.*\(-5,\)"),
        ({"x": (2, -3)}, hpc.InvalidArgumentError, "'x' must have no negative"),
        ({"x": 4}, TypeError, "shape of 'x' must be a list or a tuple .*got 4"),
        ({"x": (2.0,)}, TypeError, "shape of 'x' must be .*integers"),
        ([("x", (4,))], TypeError, "shapes must map names to shapes, got list"),
    ],
)
def test_what_is_no_shape_is_refused(shapes, kind, message):
    with pytest.raises(kind, match=message):
        hpc.Layout(shapes, "float32")


def test_empty_layout_is_fine():
    layout = hpc.Layout({}, "float64")

    assert (layout.size, len(layout), layout.views(np.empty(0))) == (0, 0, {})
    assert hpc.Layout.of({}).dtype == np.float32


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [
        (["float32"], "float32"),
        (["float16", ml_dtypes.bfloat16], "float32"),
        (["float32", "float64"], "float64"),
        (["float16", "float64"], "float64"),
    ],
)
def test_layout_of_arrays_has_the_dtype_that_holds_all(dtypes, common):
    arrays = {str(k): np.ones(2, dtype) for k, dtype in enumerate(dtypes)}

    assert hpc.Layout.of(arrays).dtype == np.dtype(common)


def test_fingerprint_distinguishes_layouts():
    layout = hpc.Layout(SHAPES, "float64")
    others = [
        hpc.Layout(SHAPES, "float32"),
        hpc.Layout({**SHAPES, "w": (4, 3)}, "float64"),
        hpc.Layout(dict(reversed(SHAPES.items())), "float64"),
        hpc.Layout({name.upper(): shape for name, shape in SHAPES.items()}, "float64"),
        hpc.Layout({**SHAPES, "more": ()}, "float64"),
    ]

    assert layout.fingerprint == hpc.Layout(dict(SHAPES), np.float64).fingerprint
    fingerprints = {layout.fingerprint, *(other.fingerprint for other in others)}
    assert len(fingerprints) == 6


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        ("int32", hpc.InvalidArgumentError),
        ("complex64", hpc.InvalidArgumentError),
        (np.longdouble, hpc.InvalidArgumentError),
        (bool, TypeError),
        (object, TypeError),
        ("U3", TypeError),
        (None, TypeError),
        ("nonsense", TypeError),
    ],
    ids=str,
)
def test_dtype_must_be_a_float_that_can_be_summed(dtype, error):
    with pytest.raises(error, match="dtype must"):
        float_dtype(dtype)


def test_halves_are_widened():
    names = ["float16", "bfloat16", "float32", "float64"]
    wide = [accumulation_dtype(float_dtype(name)).name for name in names]

    assert wide == ["float32", "float32", "float32", "float64"]


# Pieces of the buffer


@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_overlaps_find_every_element_once(lengths, start, length):
    layout = hpc.Layout({str(n): (size,) for n, size in enumerate(lengths)}, "float64")
    start = min(start, layout.size)
    piece = slice(start, min(start + length, layout.size))
    buffer, seen = np.arange(layout.size), np.zeros(layout.size, int)
    views = layout.views(buffer)
    for name, elements, where in layout.overlaps(piece):
        assert buffer[piece][where].size > 0
        np.testing.assert_array_equal(views[name][elements], buffer[piece][where])
        seen[piece][where] += 1

    expected = np.zeros(layout.size, int)
    for name in layout:
        layout.views(expected)[name][...] = 1
    expected[: piece.start] = expected[piece.stop :] = 0
    np.testing.assert_array_equal(seen, expected)

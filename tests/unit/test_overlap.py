"""Which arrays share memory, by their addresses."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import hpcaccum as hpc
from hpcaccum.overlap import bounds, crossing, overlap, same_elements, sharing


def foreign(array):
    """Return the same memory, without the array that owns it as a base."""
    memory = (ctypes.c_char * array.nbytes).from_address(bounds(array)[0])
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


FLAT = np.zeros(24)
PIECES = st.builds(
    lambda start, count, step, hidden: (foreign(FLAT) if hidden else FLAT)[
        start : start + count * abs(step) : abs(step)
    ][:: 1 if step > 0 else -1],
    st.integers(0, 20),
    st.integers(0, 4),
    st.sampled_from([1, 2, 3, -1, -2]),
    st.booleans(),
)


@given(pieces=st.lists(PIECES, max_size=5))
def test_what_shares_elements_is_found_exactly(pieces):
    named = dict(enumerate(pieces))
    pairs = [(i, j) for i in named for j in range(i)]
    expected = [p for p in pairs if np.shares_memory(named[p[0]], named[p[1]])]
    found = sharing(named)

    assert (found is not None) == bool(expected)
    assert found is None or (max(found), min(found)) in expected


# One of the others begins later and ends earlier than another one.
@example([foreign(FLAT[5:6])], [foreign(FLAT[:9]), foreign(FLAT[1:2])])
@given(pieces=st.lists(PIECES, max_size=4), others=st.lists(PIECES, max_size=4))
def test_no_crossing_is_missed(pieces, others):
    found = crossing(pieces, others)

    for piece, crosses in zip(pieces, found, strict=True):
        assert crosses >= any(np.shares_memory(piece, other) for other in others)
        for other in others:
            (low, high), (begin, end) = bounds(piece), bounds(other)
            shared = max(low, begin) < min(high, end)
            assert overlap(piece, other) == shared == np.may_share_memory(piece, other)


@pytest.mark.parametrize("dtype", ["float64", "float16", ml_dtypes.bfloat16], ids=str)
def test_same_elements_in_whatever_shape(dtype):
    flat = np.zeros(12, dtype)
    for same in (flat, flat[:], foreign(flat), flat.reshape(3, 4)):
        assert same_elements(same, flat)
    others = [flat[::-1], flat[:11], flat.copy(), flat.view("uint8"), flat[::2]]
    for other in others:
        assert not same_elements(other, flat)
    assert not same_elements(flat.reshape(3, 4).T, flat)
    assert same_elements(flat[::-1], flat[::-1])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_gradient_that_is_another_variable_in_disguise(reverse):
    values = [np.full(4, 2.0), np.full(4, 3.0)]
    x, y = (hpc.Variable(value, name) for value, name in zip(values, "xy", strict=True))
    pairs = [(foreign(y.value), x), (foreign(x.value), y)]
    hpc.SGD(1.0).apply_gradients(reversed(pairs) if reverse else pairs)

    assert x.value.tolist() == [-1.0] * 4
    assert y.value.tolist() == [1.0] * 4

"""Clipping by the global norm."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc


def pairs(*grads, dtype=np.float64):
    arrays = [None if grad is None else np.array(grad, dtype) for grad in grads]
    shapes = [() if array is None else array.shape for array in arrays]
    variables = [
        hpc.Variable(np.zeros(shape, dtype), f"w{number}")
        for number, shape in enumerate(shapes)
    ]
    return list(zip(arrays, variables, strict=True))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_large_gradients_are_scaled_to_the_norm(dtype):
    given = pairs([3.0, 0.0], None, [[4.0]], dtype=dtype)
    clipped, norm = hpc.clip_by_global_norm(given, 2.5)

    assert norm == 5
    assert [var for _, var in clipped] == [var for _, var in given]
    assert clipped[1][0] is None
    assert clipped[0][0].tolist() == [1.5, 0]
    assert clipped[2][0].tolist() == [[2]]
    assert {grad.dtype for grad, _ in clipped if grad is not None} == {np.dtype(dtype)}
    # The arrays of the caller are as before.
    assert given[0][0].tolist() == [3, 0]


def test_small_gradients_are_those_given():
    given = pairs([3.0], [4.0])
    clipped, norm = hpc.clip_by_global_norm(given, 5.0)

    assert norm == 5
    assert all(grad is old for (grad, _), (old, _) in zip(clipped, given, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    given = pairs([3.0, bad])
    clipped, norm = hpc.clip_by_global_norm(given, 1.0)

    assert not np.isfinite(norm)
    assert clipped[0][0] is given[0][0]


def test_half_precision_does_not_overflow():
    clipped, norm = hpc.clip_by_global_norm(
        pairs(np.full(4, 60000.0), dtype=np.float16), 120
    )

    assert norm == 120000
    np.testing.assert_allclose(clipped[0][0].astype(float), 60, rtol=1e-3)


@pytest.mark.parametrize("norm", [-1, np.nan, "1", None])
def test_a_bad_norm_is_refused(norm):
    with pytest.raises(hpc.InvalidArgumentError, match="clip_norm"):
        hpc.clip_by_global_norm(pairs([1.0]), norm)

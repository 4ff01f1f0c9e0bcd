"""Gradients of rows, summed on the device."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.device import kernels

INVALID = hpc.InvalidArgumentError
WAIT = 60.0


@pytest.fixture(params=["float32", "float64"])
def make(request):
    """Make accumulators of a dtype, and free them."""
    made = []

    def accumulator(shape=(6, 3), dtype=request.param, **options):
        made.append(hpc.DeviceRowAccumulator(dtype, shape, **options))
        return made[-1]

    accumulator.dtype = np.dtype(request.param)
    yield accumulator
    for each in made:
        each.free()


def apply(acc, make, rows, values, step=0, width=3, **options):
    """Apply rows that are filled with one value each."""
    filled = np.repeat(np.array(values, make.dtype)[:, None], width, axis=1)
    return acc.apply_grad(
        cupy.asarray(np.array(rows, np.int64)), cupy.asarray(filled), step, **options
    )


def check(taken, rows, values, dtype, width=3):
    indices, means = (each.get() for each in taken)
    assert (indices.dtype, means.dtype) == (np.int64, dtype)
    assert indices.tolist() == rows
    wanted = np.repeat(np.array(values, dtype)[:, None], width, axis=1)
    np.testing.assert_array_equal(means, wanted.reshape(len(rows), width))


def test_a_row_counts_with_the_weights_of_its_contributions(make):
    acc = make()
    apply(acc, make, [5, 0, 5], [1, 10, 2], weight=0.5)
    with cupy.cuda.Stream(non_blocking=True):
        apply(acc, make, [5, 2], [6, 7], weight=4)
    assert acc.statistics().weight == 4.5
    with pytest.raises(INVALID, match="weight must be a finite number"):
        apply(acc, make, [1], [1], weight=0)

    check(acc.take_grad(2, timeout=WAIT), [0, 2, 5], [10, 7, 5.1], make.dtype)
    # They are forgotten, and a gradient without rows counts.
    apply(acc, make, [], [], step=1)
    check(acc.take_grad(1, timeout=WAIT), [], [], make.dtype)
    apply(acc, make, [3], [8], step=2)
    check(acc.take_grad(1, timeout=WAIT), [3], [8], make.dtype)
    assert (acc.global_step, acc.num_accumulated()) == (3, 0)


@pytest.mark.parametrize(
    ("owner", "name"), [(cupy, "flatnonzero"), (kernels, "kernel")]
)
def test_a_take_that_fails_changes_nothing(make, monkeypatch, owner, name):
    def fail(*args):
        raise MemoryError

    acc = make()
    apply(acc, make, [1, 3], [4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(MemoryError):
            acc.take_grad(1, timeout=WAIT)
    assert (acc.global_step, acc.num_accumulated()) == (0, 1)
    apply(acc, make, [1], [6])

    check(acc.take_grad(2, timeout=WAIT), [1, 3], [5, 5], make.dtype)


@pytest.mark.parametrize("width", [1, 4, 33, 257])
def test_random_rows_match_numpy(make, width):
    acc, random = make((50, width)), np.random.default_rng(width)
    total, counts = np.zeros((50, width)), np.zeros(50)
    for _ in range(3):
        rows = random.integers(0, 50, 40)
        values = random.integers(-9, 9, (40, width))
        np.add.at(total, rows, values)
        np.add.at(counts, rows, 1)
        acc.apply_grad(cupy.asarray(rows), cupy.asarray(values.astype(make.dtype)))
    indices, means = (each.get() for each in acc.take_grad(3, timeout=WAIT))

    assert indices.tolist() == np.flatnonzero(counts).tolist()
    expected = total[indices].astype(make.dtype) / counts[indices, None]
    np.testing.assert_array_equal(means, expected.astype(make.dtype))


def test_invalid_indices_are_reported_at_the_take(make):
    acc = make(name="embedding")
    apply(acc, make, [5, 6, -1], [1, 2, 3])
    apply(acc, make, [2**40, 4], [4, 5])
    message = "embedding: 3 of the indices were not in 0 to 5 and were not added"
    with pytest.raises(INVALID, match=message):
        acc.take_grad(2, timeout=WAIT)

    assert (acc.num_accumulated(), acc.global_step) == (2, 0)
    check(acc.take_grad(2, timeout=WAIT), [4, 5], [5, 1], make.dtype)


def test_what_does_not_fit_is_refused(make):
    acc = make()
    rows = cupy.asarray(np.array([0, 1]))
    values = cupy.ones((2, 3), make.dtype)
    other = "float64" if make.dtype == np.float32 else "float32"
    for wrong, text in [
        ((rows.astype("i4"), values), "indices: .* must be of int64, got int32"),
        ((rows.get(), values), "indices must be an array on the device"),
        (([0, 1], values), "indices must be an array on the device"),
        ((rows.reshape(2, 1), values), r"indices must have shape \(2,\)"),
        ((rows[:1], values), r"values must have shape \(1, 3\), got \(2, 3\)"),
        ((rows, values[:, :2]), r"values must have shape \(2, 3\), got \(2, 2\)"),
        ((rows, values.astype(other)), "values: .* got " + other),
        ((rows, values.get()), "values must be an array on the device"),
        ((rows, values, "1"), "local_step must be one number"),
    ]:
        with pytest.raises(INVALID, match=text):
            acc.apply_grad(*wrong)
    for required, error in (0, INVALID), (1.5, TypeError):
        with pytest.raises(error, match="num_required"):
            acc.take_grad(required)

    assert acc.num_accumulated() == 0
    with pytest.raises(hpc.WaitTimeoutError, match="for 1 gradients at step 0, had 0"):
        acc.take_grad(1, timeout=0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("float16", (2, 2)), INVALID, "summed in float32 or float64, got float16"),
        (("int32", (2, 2)), INVALID, "dtype must be one of"),
        (("float32", (0, 2)), INVALID, "shape must be at least 1, got 0"),
        (("float32", (2, 2.0)), TypeError, "shape must be an integer"),
        (
            ("float32", (1, 2**32)),
            INVALID,
            "at most 4294967295 columns, got 4294967296",
        ),
        (("float32", (2, 2, 2)), INVALID, "rows and columns"),
        (("float32", 5), INVALID, "rows and columns"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        hpc.DeviceRowAccumulator(*arguments)


def test_after_free_every_use_is_an_error(make):
    acc = make(name="rows")
    apply(acc, make, [1], [1])
    assert repr(acc) == (
        f"<DeviceRowAccumulator 'rows' {make.dtype} (6, 3): step 0, 1 accumulated>"
    )
    acc.free()
    acc.free()

    assert repr(acc).endswith("(6, 3): freed>")
    for use in lambda: acc.take_grad(1), acc.num_accumulated, acc.statistics:
        with pytest.raises(hpc.FreedError, match="'rows' was freed"):
            use()

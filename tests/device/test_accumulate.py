"""kernels/accumulate.cu against the NumPy line."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import DTYPES, SIZES, SUMS, Watched, i64, launch, numbers

KINDS = pytest.mark.parametrize("kind", DTYPES)


def wide(kind):
    return DTYPES[SUMS[kind]]


def accumulate(kind, total, gradient, scale, first=False, **how):
    size = gradient.values.size
    how = how or {"size": size}
    more = (wide(kind).type(scale), i64(size), np.int32(first))
    launch(f"accumulate_{kind}", total, gradient, *more, **how)


@KINDS
@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sum_is_the_numpy_line(kind, size, shifts):
    gradients = [Watched(numbers(size, DTYPES[kind], k), shifts[0]) for k in range(3)]
    total = Watched(np.full(size, np.nan, wide(kind)), shifts[1])
    for number, gradient in enumerate(gradients):
        accumulate(kind, total, gradient, 0.5, first=number == 0)
    expected = sum(0.5 * g.values.astype(wide(kind)) for g in gradients)

    np.testing.assert_array_equal(total.get(), expected)


@KINDS
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 40])
def test_any_number_of_blocks_gives_the_same(kind, blocks):
    gradient = Watched(numbers(5003, DTYPES[kind]))
    total = Watched(np.ones(5003, wide(kind)))
    accumulate(kind, total, gradient, 2, blocks=blocks)

    np.testing.assert_array_equal(total.get(), 1 + 2 * gradient.values.astype("f8"))


@KINDS
def test_multiplies_and_adds_with_one_rounding(kind):
    # The square of 1 + d is 1 + 2 d + d d: rounding it first would lose d d.
    d = {"f64": 2.0**-30, "f32": 2.0**-13, "f16": 2.0**-10, "bf16": 2.0**-7}[kind]
    other = {"f64": d, "f32": d, "f16": 2.0**-20, "bf16": 2.0**-20}[kind]
    gradient = Watched(np.full(100, 1 + d, DTYPES[kind]))
    total = Watched(np.full(100, -(1 + d + other), wide(kind)))
    accumulate(kind, total, gradient, 1 + other)

    np.testing.assert_array_equal(total.get(), np.full(100, d * other))


@KINDS
def test_what_is_not_finite_stays_so(kind):
    values = np.array([np.nan, np.inf, -np.inf, 1, -0.0], DTYPES[kind])
    gradient, total = Watched(values), Watched(np.ones(5, wide(kind)))
    accumulate(kind, total, gradient, 1, first=True)
    np.testing.assert_array_equal(total.get(), values.astype("f8"))
    assert np.signbit(total.get()[4])

    accumulate(kind, total, gradient, -1)
    np.testing.assert_array_equal(total.get(), [np.nan, np.nan, np.nan, 0, 0])


def test_subnormals_of_float16_count_and_those_of_float32_do_not():
    smallest = Watched(np.full(5, 2.0**-24, "f2"))
    total = Watched(np.zeros(5, "f4"))
    accumulate("f16", total, smallest, 3)
    np.testing.assert_array_equal(total.get(), 3 * 2.0**-24)

    # CuPy compiles with -ftz=true.
    subnormal, total = Watched(np.full(5, 1e-40, "f4")), Watched(np.zeros(5, "f4"))
    accumulate("f32", total, subnormal, 1)
    np.testing.assert_array_equal(total.get(), 0)

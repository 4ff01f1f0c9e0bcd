"""kernels/accumulate.cu against the NumPy line."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import (
    ACCEPTED,
    COUNT,
    DROPPED,
    DTYPES,
    SIZES,
    STEP,
    SUMS,
    TICKET,
    Watched,
    header,
    i64,
    lags,
    launch,
    normal,
    numbers,
)

KINDS = pytest.mark.parametrize("kind", DTYPES)


def wide(kind):
    return DTYPES[SUMS[kind]]


def accumulate(kind, total, gradient, scale, head=None, local_step=0, met=None, **how):
    size = gradient.values.size
    if "blocks" not in how:
        how["size"] = size
    factor = wide(kind).type(scale)
    more = (head, i64(local_step), met)
    launch(f"accumulate_{kind}", total, gradient, factor, i64(size), *more, **how)


@KINDS
@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sum_is_the_numpy_line(kind, size, shifts):
    gradients = [Watched(numbers(size, DTYPES[kind], k), shifts[0]) for k in range(3)]
    total = Watched(np.full(size, np.nan, wide(kind)), shifts[1])
    head = header()
    for gradient in gradients:
        accumulate(kind, total, gradient, 0.5, head)
    expected = sum(0.5 * g.values.astype(wide(kind)) for g in gradients)

    np.testing.assert_array_equal(total.get(), expected)
    words = head.get()
    assert words[[COUNT, ACCEPTED, DROPPED, TICKET]].tolist() == [3, 3, 0, 0]


@KINDS
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 40])
def test_any_number_of_blocks_gives_the_same(kind, blocks):
    gradient = Watched(numbers(5003, DTYPES[kind]))
    total, head = Watched(np.ones(5003, wide(kind))), header(count=1)
    accumulate(kind, total, gradient, 2, head, blocks=blocks)

    np.testing.assert_array_equal(total.get(), 1 + 2 * gradient.values.astype("f8"))
    assert head.get()[[COUNT, TICKET]].tolist() == [2, 0]


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
def test_stale_changes_nothing_but_what_counts_it(kind):
    gradient = Watched(numbers(1025, DTYPES[kind]))
    total, met = Watched(normal(1025, wide(kind))), Watched(i64([-1]))
    head = header(step=7, count=2)
    accumulate(kind, total, gradient, 1, head, 6, met)

    np.testing.assert_array_equal(total.get(), total.values)
    words = head.get()
    assert words[[STEP, COUNT, ACCEPTED, DROPPED, TICKET]].tolist() == [7, 2, 0, 1, 0]
    assert lags(words) == {1: 1}
    assert met.get().tolist() == [7]


@pytest.mark.parametrize("blocks", [1, 5])
def test_lags_are_counted_within_their_bounds(blocks):
    gradient, total = Watched(np.ones(9, "f4")), Watched(np.zeros(9, "f4"))
    head, met = header(step=100), Watched(i64([-1]))
    for local_step in (100, 101, 5000, 99, 69, 68, 0, -5000):
        accumulate("f32", total, gradient, 1, head, local_step, met, blocks=blocks)
    words = head.get()

    assert lags(words) == {0: 3, 1: 1, 31: 4}
    assert words[[STEP, COUNT, ACCEPTED, DROPPED, TICKET]].tolist() == [100, 3, 3, 5, 0]
    assert met.get().tolist() == [100]
    np.testing.assert_array_equal(total.get(), 3)


def test_met_is_written_for_a_fresh_gradient_too():
    met = Watched(i64([-1]))
    gradient, total = Watched(np.ones(3, "f4")), Watched(np.zeros(3, "f4"))
    accumulate("f32", total, gradient, 1, header(step=4), 9, met)

    assert met.get().tolist() == [4]


@KINDS
def test_without_a_header_it_always_adds(kind):
    gradient = Watched(numbers(33, DTYPES[kind]))
    total = Watched(np.full(33, 2, wide(kind)))
    accumulate(kind, total, gradient, 1, None, -5)

    np.testing.assert_array_equal(total.get(), 2 + gradient.values.astype("f8"))


@KINDS
def test_what_is_not_finite_stays_so(kind):
    values = np.array([np.nan, np.inf, -np.inf, 1, -0.0], DTYPES[kind])
    gradient, total = Watched(values), Watched(np.ones(5, wide(kind)))
    accumulate(kind, total, gradient, 1, header(count=0))
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

"""The sum of gradients: in rank order, by chunks, by several threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import summation as module
from hpcaccum.summation import add_in_order, copy_pieces, divide

from ..common import same_bits


@pytest.fixture
def small(monkeypatch):
    """Chunks of 64 elements; a thread for every 100, from 200 on."""
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_SHARED", 200)
    monkeypatch.setattr(module, "_SHARE", 100)


def vectors(number, size=1001, dtype=np.float32):
    rng = np.random.default_rng(number)
    return [rng.normal(size=size).astype(dtype) for _ in range(number)]


def in_order(parts, divisor, dtype):
    """Return the sum by definition."""
    total = parts[0].astype(dtype)
    for part in parts[1:]:
        total = total + part.astype(dtype)
    return total / dtype(divisor)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("number", "factors"),
    [
        *((number, None) for number in (1, 2, 5)),
        *((1, [2.5]), (2, [1, 0.3]), (3, [0.3, 1, 7]), (5, [0.3, 2, 1, 7, 0.1])),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_any_number_of_threads_gives_the_same_bits(
    small, threads, number, factors, dtype
):
    parts = vectors(number, dtype=dtype)
    wide = np.result_type(dtype, np.float32).type
    products = [
        part.astype(wide) * wide(factor)
        for part, factor in zip(parts, factors or [1] * number, strict=True)
    ]
    for divisor in (1, 3, 4.0, 0.5, sum(factors or [1])):
        out = np.full(1001, np.nan, wide)
        add_in_order(parts, out, divisor, threads, factors)
        same_bits(out, in_order(products, divisor, wide))


def test_a_sum_may_be_added_to_in_place(small):
    first, second = vectors(2)
    expected = first * np.float32(0.3) + second * np.float32(7)
    add_in_order([first, second], first, factors=[0.3, 7])
    same_bits(first, expected)


def test_threads_are_as_silent_about_infinity(small):
    huge = np.full(1001, np.finfo(np.float32).max)
    out, halves = np.empty_like(huge), np.zeros(1001, np.float16)
    with np.errstate(all="ignore"):
        add_in_order([huge, huge], out, 1, 3)
        copy_pieces([(halves, np.full(1001, 1e9))], 3)

    assert np.isinf(out).all()
    assert np.isinf(halves).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_narrower_result_is_rounded_once(small, dtype, threads):
    parts = vectors(4)
    out = np.empty(1001, dtype)
    add_in_order(parts, out, 3, threads)

    same_bits(out, in_order(parts, 3, np.float32).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 64, 1 << 20, (1 << 20) - 1])
def test_division_is_true_division(dtype, count):
    info = np.finfo(dtype)
    edges = [
        0,
        -0.0,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        np.inf,
        3 * info.eps,
    ]
    total = np.concatenate([vectors(1, dtype=dtype)[0], np.array(edges, dtype)])
    expected = total / dtype(count)
    divide(total, count)

    same_bits(total, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[1001], [1, 0, 199, 300], [99], []])
def test_any_number_of_threads_copies_the_same(small, threads, sizes):
    sources = [np.full(size, 1e30 + size) for size in sizes]
    targets = [np.zeros(size, np.float32) for size in sizes]
    copy_pieces(list(zip(targets, sources, strict=True)), threads)

    for target, source in zip(targets, sources, strict=True):
        same_bits(target, source.astype(np.float32))

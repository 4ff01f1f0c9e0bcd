"""kernels/finish.cu: mean, squared norm, clipped mean."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import DTYPES, SIZES, Watched, i64, launch, normal

WIDE = pytest.mark.parametrize("kind", ["f32", "f64"])
SHIFTS = pytest.mark.parametrize("shift", [0, 1])


def mean(kind, out, total, count, **how):
    size = total.values.size
    how = how or {"size": size}
    launch(f"mean_{kind}", out, total, i64(size), np.float64(count), **how)


@WIDE
@SHIFTS
@pytest.mark.parametrize("size", SIZES)
def test_mean_divides_once(kind, size, shift):
    total = Watched(normal(size, DTYPES[kind]))
    out = Watched(np.full(size, np.nan, DTYPES[kind]), shift)
    for weight in (3, 0.3):
        mean(kind, out, total, weight)

        expected = total.values / DTYPES[kind].type(weight)
        np.testing.assert_array_equal(out.get(), expected)
    np.testing.assert_array_equal(total.get(), total.values)


@WIDE
@pytest.mark.parametrize("blocks", [1, 2, 5, 33])
def test_mean_may_be_in_place_and_may_be_the_sum(kind, blocks):
    total = Watched(normal(5003, DTYPES[kind]))
    mean(kind, total, total, 7, blocks=blocks)
    expected = total.values / DTYPES[kind].type(7)
    np.testing.assert_array_equal(total.get(), expected)

    out = Watched(np.zeros(5003, DTYPES[kind]))
    mean(kind, out, total, 1, blocks=blocks)
    np.testing.assert_array_equal(out.get(), expected)


def square_norm(kind, x, blocks):
    """Return the squared norm; the ticket must be as it was before."""
    partial, out = Watched(np.full(blocks, np.nan)), Watched(np.full(1, np.nan))
    ticket, size = Watched(i64([0])), i64(x.values.size)
    launch(f"square_norm_{kind}", x, size, partial, ticket, out, blocks=blocks)
    assert ticket.get().tolist() == [0]
    return out.get()[0]


@pytest.mark.parametrize("kind", DTYPES)
@SHIFTS
@pytest.mark.parametrize("size", SIZES)
def test_square_norm_is_that_of_float64(kind, size, shift):
    x = Watched(normal(size, DTYPES[kind]), shift)
    expected = np.sum(x.values.astype("f8") ** 2)

    for blocks in (1, 3):
        assert square_norm(kind, x, blocks) == pytest.approx(expected, rel=1e-13)


def test_square_norm_of_more_blocks_than_a_block_has_threads():
    x = Watched(np.ones(300 * 256 * 4, "f4"))

    assert square_norm("f32", x, 300) == x.values.size


@pytest.mark.parametrize("kind", DTYPES)
def test_square_norm_has_the_same_bits_whichever_block_ends_first(kind):
    x = Watched(normal(5003, DTYPES[kind]))

    assert len({square_norm(kind, x, 7).tobytes() for _ in range(20)}) == 1


def test_square_norm_of_large_numbers_is_no_infinity_and_of_infinity_is():
    assert square_norm("f32", Watched(np.full(3, 1e30, "f4")), 1) > 1e60
    assert square_norm("f32", Watched(np.float32([1, np.inf])), 1) == np.inf
    assert np.isnan(square_norm("f16", Watched(np.float16([1, np.nan])), 1))


def mean_clip(kind, out, total, count, clip):
    norm = Watched(np.array([np.sum(total.values.astype("f8") ** 2)]))
    size = total.values.size
    more = (i64(size), np.float64(count), norm, np.float64(clip))
    launch(f"mean_clip_{kind}", out, total, *more, size=size)


@WIDE
@SHIFTS
@pytest.mark.parametrize("count", [1, 4, 0.3])
@pytest.mark.parametrize("size", [1, 33, 1025, 5003])
def test_mean_clip_scales_down_what_is_too_long(kind, size, count, shift):
    total = Watched(normal(size, DTYPES[kind]))
    plain = total.values / DTYPES[kind].type(count)
    norm = np.sqrt(np.sum(total.values.astype("f8") ** 2)) / count
    for clip in (norm / 3, norm * 1.01):
        out = Watched(np.zeros(size, DTYPES[kind]), shift)
        mean_clip(kind, out, total, count, clip)
        factor = DTYPES[kind].type(min(1, clip / norm))

        np.testing.assert_allclose(
            out.get(), plain * factor, rtol=np.finfo(DTYPES[kind]).eps
        )


@WIDE
def test_mean_clip_of_zeros_is_zeros_and_of_nan_is_nan(kind):
    zeros = Watched(np.zeros(9, DTYPES[kind]))
    mean_clip(kind, zeros, zeros, 2, 1.0)
    assert not zeros.get().any()

    broken = Watched(np.array([1, np.nan, 2], DTYPES[kind]))
    mean_clip(kind, broken, broken, 2, 1.0)
    assert np.isnan(broken.get()).all()

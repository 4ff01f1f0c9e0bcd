"""kernels/compress.cu: eight bits an element, and what is left of it."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import (
    ACCEPTED,
    COUNT,
    DROPPED,
    DTYPES,
    SIZES,
    TICKET,
    Watched,
    header,
    i64,
    launch,
    normal,
)

GROUP = 1024
KINDS = pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
# Of gradient, residual and q: as vectors, or one by one.
SHIFTS = pytest.mark.parametrize(
    "shifts", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str
)


class Compressed:
    """One gradient through the kernel, and through NumPy."""

    def __init__(self, kind, gradient, residual, shifts=(0, 0, 0), blocks=2):
        self.size = gradient.size
        self.gradient = Watched(gradient, shifts[0])
        self.residual = Watched(residual, shifts[1])
        self.q = Watched(np.full(self.size, 55, np.int8), shifts[2])
        self.scales = Watched(np.full(-(-self.size // GROUP), 9, "f4"))
        launch(
            f"compress_int8_{kind}",
            *(self.gradient, self.residual, self.q, self.scales, i64(self.size)),
            blocks=blocks,
        )

    def expected(self):
        """Return q, scales and residual."""
        error = self.gradient.values.astype("f4") + self.residual.values
        starts = range(0, self.size, GROUP)
        most = np.float32([np.abs(error[i : i + GROUP]).max() for i in starts])
        scales = most / np.float32(127)
        each = np.repeat(scales, GROUP)[: self.size]
        q = np.rint(error / np.where(each > 0, each, np.float32(1)))
        # Exact in float64, so rounded once.
        residual = (error - each.astype("f8") * q).astype("f4")
        return q.astype(np.int8), scales, residual


@KINDS
@SHIFTS
@pytest.mark.parametrize("size", [*SIZES, 4096, 9000])
def test_compress_is_the_numpy_line(kind, size, shifts):
    residual = normal(size, "f4", seed=1) / 100
    done = Compressed(kind, normal(size, DTYPES[kind]), residual, shifts)

    q, scales, left = done.expected()
    np.testing.assert_array_equal(done.q.get(), q)
    np.testing.assert_array_equal(done.scales.get(), scales)
    np.testing.assert_array_equal(done.residual.get(), left)
    np.testing.assert_array_equal(done.gradient.get(), done.gradient.values)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_any_number_of_blocks_compresses_alike(blocks):
    size = 20 * GROUP + 1
    done = Compressed("f32", normal(size, "f4"), np.zeros(size, "f4"), blocks=blocks)

    q, scales, left = done.expected()
    np.testing.assert_array_equal(done.q.get(), q)
    np.testing.assert_array_equal(done.scales.get(), scales)
    np.testing.assert_array_equal(done.residual.get(), left)


def test_the_largest_elements_are_127_and_ties_go_to_even():
    gradient = np.zeros(GROUP, "f4")
    gradient[[0, 500, 1023]] = 127, -127, 126
    gradient[1:5] = 0.5, 1.5, 2.5, -0.5
    done = Compressed("f32", gradient, np.zeros(GROUP, "f4"))

    assert done.q.get()[[0, 500, 1023, 1, 2, 3, 4]].tolist() == [
        127,
        -127,
        126,
        *(0, 2, 2, 0),
    ]
    assert done.residual.get()[1:5].tolist() == [0.5, -0.5, 0.5, -0.5]


@KINDS
@pytest.mark.parametrize("at", [0, 31, 63, 64, 500, 1023])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_is_told_by_its_scale(kind, at, broken):
    gradient = normal(3 * GROUP, DTYPES[kind])
    gradient[GROUP + at] = broken
    done = Compressed(kind, gradient, np.ones(3 * GROUP, "f4"))

    assert np.isnan(done.scales.get()).tolist() == [False, True, False]
    assert not done.q.get()[GROUP : 2 * GROUP].any()
    assert not done.residual.get()[GROUP : 2 * GROUP].any()
    assert done.q.get()[:GROUP].any()
    assert done.q.get()[2 * GROUP :].any()


def test_a_group_of_zeros_is_zeros():
    done = Compressed("f32", np.zeros(GROUP, "f4"), np.zeros(GROUP, "f4"))

    assert done.scales.get().tolist() == [0]
    assert not done.q.get().any()
    assert not done.residual.get().any()


def test_a_sum_that_overflows_is_not_finite():
    large = np.full(GROUP, 3e38, "f4")
    done = Compressed("f32", large, large)

    assert np.isnan(done.scales.get()).all()


def add(total, q, scales, scale, head=None, local_step=0, **how):
    args = (np.float32(scale), i64(q.values.size), head, i64(local_step), None)
    how = how or {"size": q.values.size}
    launch("accumulate_int8_f32", total, q, scales, *args, **how)


@SHIFTS
@pytest.mark.parametrize("size", [*SIZES, 9000])
def test_what_was_compressed_is_added_scaled(size, shifts):
    random = np.random.default_rng(size)
    q = random.integers(-127, 128, size).astype(np.int8)
    # Powers of two, so that all is exact.
    scales = 2.0 ** -random.integers(0, 5, -(-size // GROUP))
    total = Watched(np.full(size, np.nan, "f4"), shifts[1])
    head, given = header(), (Watched(q, shifts[2]), Watched(scales.astype("f4")))
    add(total, *given, 0.5, head)
    add(total, *given, 2, head)
    add(total, *given, 64, head, -1)

    each = np.repeat(scales, GROUP)[:size]
    np.testing.assert_array_equal(total.get(), 2.5 * each * q)
    words = head.get()
    assert words[[COUNT, ACCEPTED, DROPPED, TICKET]].tolist() == [2, 2, 1, 0]


@pytest.mark.parametrize("blocks", [1, 3, 50])
def test_a_scale_that_is_nan_makes_its_group_nan(blocks):
    q, total = Watched(np.zeros(3 * GROUP, np.int8)), Watched(np.ones(3 * GROUP, "f4"))
    add(total, q, Watched(np.float32([1, np.nan, 1])), 1, blocks=blocks)

    broken = np.isnan(total.get()).reshape(3, GROUP)
    assert broken.all(axis=1).tolist() == [False, True, False]
    assert broken.any(axis=1).tolist() == [False, True, False]

"""kernels/multi_tensor.cu: many arrays, one launch."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from .launching import DTYPES, Watched, i64, launch, normal, numbers

CHUNK = 1024
SIZES = [1, 4097, 0, 33, 1024, 5003, 2]
KINDS = list(DTYPES)


class Arrays:
    """Arrays of all kinds, and where each has its place in a flat buffer."""

    def __init__(self, kinds, make, gap=16, shift=0):
        dtypes = [DTYPES[kinds[k % len(kinds)]] for k in range(len(SIZES))]
        pairs = zip(SIZES, dtypes, strict=True)
        self.arrays = [
            Watched(make(size, dtype, k), shift)
            for k, (size, dtype) in enumerate(pairs)
        ]
        # Odd offsets where the gap is odd: vectors may then not be moved.
        starts = np.cumsum([0, *(-(-size // gap) * gap for size in SIZES)])
        self.offsets, self.total = starts[:-1].tolist(), int(starts[-1])

    def tables(self):
        numbers_of = {dtype: k for k, dtype in enumerate(DTYPES.values())}
        rows = [
            (
                each.array.data.ptr,
                offset,
                each.values.size,
                numbers_of[each.array.dtype],
            )
            for each, offset in zip(self.arrays, self.offsets, strict=True)
        ]
        chunks = [
            (row, first)
            for row, size in enumerate(SIZES)
            for first in range(0, size, CHUNK)
        ]
        return cupy.asarray(i64(rows)), cupy.asarray(i64(chunks)), len(chunks)

    def launch(self, name, flat, *more):
        arrays, chunks, blocks = self.tables()
        launch(name, flat, arrays, chunks, i64(CHUNK), *more, blocks=blocks)

    def flat(self, values, fill, dtype):
        """Return a buffer with values at their places and ``fill`` between."""
        buffer = np.full(self.total, fill, dtype)
        for offset, value in zip(self.offsets, values, strict=True):
            buffer[offset : offset + value.size] = value
        return buffer


PLACES = pytest.mark.parametrize(
    ("gap", "shift"), [(16, 0), (1, 0), (16, 1)], ids=["aligned", "packed", "shifted"]
)


@PLACES
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_accumulate_adds_every_array_at_its_place(kind, gap, shift):
    kinds = KINDS if kind == "f64" else ["f32", "f16", "bf16"]
    rounds = [
        Arrays(kinds, lambda n, d, k, r=r: numbers(n, d, 7 * r + k), gap, shift)
        for r in range(2)
    ]
    total = Watched(np.full(rounds[0].total, 5, DTYPES[kind]))
    for number, arrays in enumerate(rounds):
        more = (DTYPES[kind].type(0.25), np.int32(number == 0))
        arrays.launch(f"multi_accumulate_{kind}", total, *more)

    # The gaps between the arrays stay.
    sums = [
        0.25 * (first.values.astype("f8") + second.values.astype("f8"))
        for first, second in zip(rounds[0].arrays, rounds[1].arrays, strict=True)
    ]
    np.testing.assert_array_equal(total.get(), rounds[0].flat(sums, 5, DTYPES[kind]))


def converted(values, dtype):
    """The one line that the kernels follow."""
    with np.errstate(over="ignore"):
        return values.astype(dtype)


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_pack_converts_every_array_to_its_place(kind, gap, shift):
    # float64 only of numbers that float32 has: ml_dtypes rounds others twice.
    arrays = Arrays(KINDS, lambda n, d, k: normal(n, "f4", k).astype(d), gap, shift)
    flat = Watched(np.full(arrays.total, 3, DTYPES[kind]))
    arrays.launch(f"pack_{kind}", flat)

    values = [converted(a.values, DTYPES[kind]) for a in arrays.arrays]
    np.testing.assert_array_equal(flat.get(), arrays.flat(values, 3, DTYPES[kind]))


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_unpack_converts_every_place_to_its_array(kind, gap, shift):
    arrays = Arrays(KINDS, lambda n, d, k: np.full(n, 9, d), gap, shift)
    flat = Watched(normal(arrays.total, "f4").astype(DTYPES[kind]))
    arrays.launch(f"unpack_{kind}", flat)

    for each, offset in zip(arrays.arrays, arrays.offsets, strict=True):
        piece = flat.values[offset : offset + each.values.size]
        expected = converted(piece, each.values.dtype)
        np.testing.assert_array_equal(each.get(), expected)


ROUNDED = [
    # (float64 value, float16, bfloat16): ties go to even, and nothing is rounded twice.
    (1 + 2.0**-11, 1.0, 1.0),
    (1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-10, 1.0),
    (1 + 2.0**-8, 1 + 2.0**-8, 1.0),
    (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 2.0**-7),
    (1 + 3 * 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
    (65519.0, 65504.0, 65536.0),
    (65520.0, np.inf, 65536.0),
    (-1e39, -np.inf, -np.inf),
    (2.0**-25, 0.0, 2.0**-25),
    (3 * 2.0**-25, 2.0**-23, 3 * 2.0**-25),
    (np.nan, np.nan, np.nan),
    (-np.inf, -np.inf, -np.inf),
]


@pytest.mark.parametrize(("kind", "column"), [("f16", 1), ("bf16", 2)])
def test_pack_rounds_float64_once(kind, column):
    values = np.array([row[0] for row in ROUNDED])
    array, flat = Watched(values), Watched(np.zeros(len(ROUNDED), DTYPES[kind]))
    table = cupy.asarray(i64([[array.array.data.ptr, 0, values.size, 1]]))
    chunks = cupy.asarray(i64([[0, 0]]))
    launch(f"pack_{kind}", flat, table, chunks, i64(64), blocks=1)

    expected = [row[column] for row in ROUNDED]
    np.testing.assert_array_equal(flat.get().astype("f8"), expected)


@PLACES
@pytest.mark.parametrize("kind", KINDS)
def test_largest_is_the_largest_absolute_value(kind, gap, shift):
    arrays = Arrays([kind], normal, gap, shift)
    result = Watched(np.zeros(len(SIZES)))
    arrays.launch("largest_f64", result)

    values = [each.values.astype("f8") for each in arrays.arrays]
    expected = [np.abs(each).max(initial=0) for each in values]
    np.testing.assert_array_equal(result.get(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1023, 1024, 3000, 4096])
def test_nothing_hides_what_is_not_finite(kind, place):
    for value, other in ((np.nan, np.inf), (np.inf, 7), (-np.inf, 7)):

        def make(size, dtype, seed, value=value, other=other):
            array = np.full(size, other, dtype)
            array[place : place + 1] = value
            return array

        arrays, result = Arrays([kind], make), Watched(np.zeros(len(SIZES)))
        arrays.launch("largest_f64", result)

        large = [abs(value if size > place else other) for size in SIZES]
        expected = [top if size else 0 for top, size in zip(large, SIZES, strict=True)]
        np.testing.assert_array_equal(result.get(), expected)

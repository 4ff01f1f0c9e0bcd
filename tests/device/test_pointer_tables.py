"""Many arrays in one launch: the tables that the device reads."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

from hpcaccum import InvalidArgumentError, Layout
from hpcaccum.device.multi_tensor import PointerTable, check_device_array

DTYPES = [
    np.dtype(np.float32),
    np.dtype(np.float64),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
]
# More than one chunk, exactly one, one more; none, one, few.
SHAPES = {
    "long": (40000,),
    "chunk": (128, 128),
    "more": (16385,),
    "none": (0, 4),
    "one": (),
    "few": (3, 5),
}


def numbers(shapes, dtypes, seed=0):
    """Return random small integers on the host, by name, in dtypes that take turns."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(-9, 9, shape).astype(dtypes[number % len(dtypes)])
        for number, (name, shape) in enumerate(shapes.items())
    }


def on_device(arrays):
    return {name: cupy.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_all_dtypes_are_packed_and_unpacked(dtype):
    layout = Layout(SHAPES, np.float32)
    table = PointerTable(layout)
    flat = cupy.asarray(np.full(layout.size, 77, dtype))
    host = numbers(SHAPES, DTYPES)
    table.pack(flat, on_device(host))
    packed = flat.get()

    for name, view in layout.views(packed).items():
        np.testing.assert_array_equal(view, host[name].astype(dtype))
        view[...] = 77
    # Nothing between the arrays was written.
    assert (packed == 77).all()
    outs = on_device({name: np.full_like(host[name], 55) for name in SHAPES})
    table.unpack(flat, outs)
    for name, out in outs.items():
        assert out.dtype == host[name].dtype
        np.testing.assert_array_equal(out.get(), host[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_are_accumulated(dtype):
    layout = Layout(SHAPES, dtype)
    table, flat = PointerTable(layout), cupy.zeros(layout.size, dtype)
    host = numbers(SHAPES, DTYPES)
    arrays = on_device(host)
    for scale in 1, 0.25:
        table.addition(flat, arrays, scale)()

    for name, view in layout.views(flat.get()).items():
        np.testing.assert_array_equal(view, 1.25 * host[name].astype(dtype))


def test_some_of_the_arrays_in_any_order():
    layout = Layout(SHAPES, np.float32)
    table, flat = PointerTable(layout), cupy.zeros(layout.size, np.float32)
    host = numbers(SHAPES, DTYPES[:1])
    given = on_device(host)
    for names in ["few", "more"], ["more", "one"]:
        table.pack(flat, {name: given[name] for name in names})

    views = layout.views(flat.get())
    for name in SHAPES:
        packed = host[name] if name in ("few", "more", "one") else 0
        np.testing.assert_array_equal(views[name], np.zeros_like(host[name]) + packed)


def test_no_arrays_at_all():
    table = PointerTable(Layout({}, np.float32))
    table.pack(cupy.zeros(0, np.float32), {})
    table.addition(cupy.zeros(0, np.float32), {})()

    assert table.table({}).chunks.blocks == 1


def test_arrays_that_are_not_aligned():
    layout = Layout({"a": (1000,)}, np.float32)
    table, flat = PointerTable(layout), cupy.zeros(layout.size, np.float32)
    base = cupy.asarray(np.arange(1001, dtype=np.float32))
    table.pack(flat, {"a": base[1:]})

    np.testing.assert_array_equal(flat.get()[:1000], np.arange(1, 1001))


def test_tables_are_kept_for_arrays_at_the_same_places():
    layout = Layout({"a": (3,), "b": (2,)}, np.float32)
    table = PointerTable(layout)
    arrays = on_device(numbers(layout.shapes, DTYPES[:1]))
    first = table.table(arrays)
    again = table.table(dict(arrays))

    assert again.arrays is first.arrays
    assert again.chunks is first.chunks
    other = table.table({**arrays, "b": cupy.zeros(2, np.float32)})
    assert other.arrays is not first.arrays
    assert other.chunks is first.chunks
    assert first.arrays.get().tolist() == [
        [arrays["a"].data.ptr, 0, 3, 0],
        [arrays["b"].data.ptr, 16, 2, 0],
    ]
    assert first.chunks.rows.get().tolist() == [[0, 0], [1, 0]]


def test_arrays_of_another_dtype_at_the_same_place_are_others():
    layout = Layout({"a": (4,)}, np.float32)
    table, flat = PointerTable(layout), cupy.zeros(layout.size, np.float32)
    half = cupy.asarray(np.array([1, 2, 3, 4], np.float16))
    for array in half, half.view(ml_dtypes.bfloat16):
        table.pack(flat, {"a": array})

        expected = array.get().astype(np.float32)
        np.testing.assert_array_equal(flat.get()[:4], expected)


def test_tables_belong_to_a_stream():
    layout = Layout({"a": (3,)}, np.float32)
    table, arrays = PointerTable(layout), {"a": cupy.zeros(3, np.float32)}
    here = table.table(arrays)
    with cupy.cuda.Stream(non_blocking=True):
        there = table.table(arrays)

    assert there.arrays is not here.arrays
    assert there.chunks is not here.chunks
    assert table.table(arrays).arrays is here.arrays


def test_few_tables_are_kept_and_the_oldest_goes():
    layout = Layout({"a": (3,)}, np.float32)
    table = PointerTable(layout)
    places = [{"a": cupy.zeros(3, np.float32)} for _ in range(11)]
    first, second = (table.table(arrays).arrays for arrays in places[:2])
    for arrays in places[2:10]:
        table.table(arrays)
    assert table.table(places[0]).arrays is first
    table.table(places[10])

    assert table.table(places[0]).arrays is first
    assert table.table(places[1]).arrays is not second


def test_tables_of_single_arrays_are_kept():
    shapes = {f"a{number}": (2,) for number in range(20)}
    table = PointerTable(Layout(shapes, np.float32))
    arrays = {name: cupy.zeros(2, np.float32) for name in shapes}
    made = [table.table({name: arrays[name]}).arrays for name in shapes]
    again = [table.table({name: arrays[name]}).arrays for name in shapes]

    assert all(one is other for one, other in zip(made, again, strict=True))


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (lambda: np.zeros(3, np.float32), "x must be an array on the device, got nd"),
        (lambda: cupy.zeros(4, np.float32), r"x must have shape \(3,\), got \(4,\)"),
        (lambda: cupy.zeros(3, np.int32), "must be of float32, got int32"),
        (lambda: cupy.zeros(6, np.float32)[::2], "must be contiguous"),
    ],
)
def test_arrays_are_checked(array, text):
    with pytest.raises(InvalidArgumentError, match=text):
        check_device_array("x", array(), (3,), DTYPES[:1])
    check_device_array("x", cupy.zeros(3, np.float32), (3,), DTYPES[:1])

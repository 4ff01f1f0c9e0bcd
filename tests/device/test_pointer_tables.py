"""Many arrays in one launch: the tables that the device reads."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

from hpcaccum import Layout
from hpcaccum.device.multi_tensor import PointerTable

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


def test_arrays_of_another_dtype_at_the_same_place_are_others():
    layout = Layout({"a": (4,)}, np.float32)
    table, flat = PointerTable(layout), cupy.zeros(layout.size, np.float32)
    half = cupy.asarray(np.array([1, 2, 3, 4], np.float16))
    for array in half, half.view(ml_dtypes.bfloat16):
        table.pack(flat, {"a": array})

        expected = array.get().astype(np.float32)
        np.testing.assert_array_equal(flat.get()[:4], expected)

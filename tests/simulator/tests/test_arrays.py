"""The simulated CuPy refuses what CuPy refuses. Other tests show what it computes."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from .simulated import (
    ONLY_SIMULATED,
    latest,  # noqa: F401
    ready,
)

pytestmark = ONLY_SIMULATED

REFUSED = {
    "np.asarray": (lambda x: np.asarray(x), TypeError, "Implicit conversion"),
    "np.array of a list": (lambda x: np.array([x]), TypeError, "Implicit conversion"),
    "host right": (lambda x: x + np.ones(2), TypeError, "Unsupported type"),
    "host left": (lambda x: np.ones(2) + x, TypeError, "Unsupported type"),
    "host ufunc": (lambda x: np.add(x, np.ones(2)), TypeError, "Unsupported type"),
    "host out": (lambda x: np.add(x, 1, out=np.ones(2)), TypeError, "Unsupported"),
    "device into host": (
        lambda x: np.ones(2, "float32").__iadd__(x),
        TypeError,
        "Unsupported",
    ),
    "host matmul": (lambda x: x @ np.ones(2), TypeError, "numpy.ndarray"),
    "list": (lambda x: np.add(x, [1, 2]), TypeError, "Unsupported type"),
    "host into slice": (
        lambda x: x.__setitem__(..., np.ones(2)),
        ValueError,
        "non-scalar numpy.ndarray",
    ),
    "copyto": (lambda x: cupy.copyto(x, np.ones(2)), ValueError, "non-scalar"),
    "concatenate": (
        lambda x: cupy.concatenate([x, np.ones(2)]),
        TypeError,
        "Unsupported",
    ),
    "get dtype": (lambda x: x.get(out=np.ones(2)), TypeError, "cannot be obtained"),
    "get shape": (
        lambda x: x.get(out=np.ones(3, "float32")),
        ValueError,
        "Shape mismatch",
    ),
    "set dtype": (lambda x: x.set(np.ones(2)), TypeError, "cannot be set"),
    "set shape": (lambda x: x.set(np.ones(1, "float32")), ValueError, "Shape mismatch"),
    "set list": (lambda x: x.set([1, 2]), TypeError, "Only numpy.ndarray"),
    "set strided": (
        lambda x: (
            x[::2].set(np.ones(1, "float32")) or cupy.ones(4)[::2].set(np.ones(2))
        ),
        RuntimeError,
        "non-contiguous",
    ),
    "unsafe out": (
        lambda x: np.add(x, x, out=cupy.ones(2, "int32")),
        TypeError,
        "Cannot cast",
    ),
    "out shape": (lambda x: np.add(x, x, out=cupy.ones(1)), ValueError, "Out shape"),
    "order": (lambda x: np.add(x, x, order="C"), TypeError, "Wrong arguments"),
    "unknown function": (lambda x: np.histogram_bin_edges(x), TypeError, "no impl"),
    "bool": (lambda x: bool(x), ValueError, "ambiguous"),
    "item": (lambda x: x.item(), ValueError, "size 1"),
    "len": (lambda x: len(x[0]), TypeError, "unsized"),
    "hash": (lambda x: hash(x), TypeError, "unhashable"),
    "objects": (lambda x: cupy.empty(1, object), ValueError, "Unsupported dtype"),
    "broadcast": (lambda x: x.__setitem__(..., cupy.ones(3)), ValueError, "broadcast"),
    "memoryview": (lambda x: memoryview(x), TypeError, "bytes-like"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_cupy_refuses(name):
    call, error, text = REFUSED[name]
    x = ready([1, 2])

    with pytest.raises(error, match=text):
        call(x)

    np.testing.assert_array_equal(x.get(), [1, 2])


def test_is_no_numpy_array():
    x = ready([1, 2])

    assert not isinstance(x, np.ndarray)
    assert not hasattr(x, "ctypes")
    assert not hasattr(x, "__array_interface__")
    assert not hasattr(x.flags, "writeable")

"""The simulated CuPy computes as NumPy does and refuses what CuPy refuses."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np
import pytest

from .simulated import (
    ONLY_SIMULATED,
    latest,  # noqa: F401
    ready,
    seen,
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


# What it computes.

FLOATS = ["float16", "float32", "float64", np.dtype(ml_dtypes.bfloat16)]
UFUNCS = "add subtract multiply divide maximum minimum sqrt square exp log abs isfinite"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UFUNCS.split())
def test_ufuncs_equal_numpy(name, dtype):
    ufunc = getattr(np, name)
    hosts = [
        np.array([[1, -2, 0], [np.inf, np.nan, 3]]).astype(dtype),
        np.array([2, 0, -1]).astype(dtype),
    ][: ufunc.nin]
    expected = ufunc(*hosts)

    for function in (ufunc, getattr(cupy, name)):
        result = function(*map(cupy.asarray, hosts))
        out = cupy.empty(expected.shape, expected.dtype)
        assert result.dtype == expected.dtype
        assert function(*map(cupy.asarray, hosts), out=out) is out
        # NumPy compares no NaN of bfloat16.
        for each in (result, out):
            values = each.get().astype("float64")
            np.testing.assert_array_equal(values, expected.astype("float64"))


SCALARS = [2, 2.5, True, np.float32(2.5), np.float64(2.5), np.int64(2), np.array(2.5)]


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}{s}")
def test_scalars_have_the_dtypes_of_numpy(scalar, dtype):
    host = np.array([1, 2, 3], dtype)

    for expected, result in [
        (host * scalar, cupy.asarray(host) * scalar),
        (scalar - host, scalar - cupy.asarray(host)),
    ]:
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.get(), expected)


FUNCTIONS = {
    "sum": lambda xp, a, rows: np.sum(a, axis=0),
    "sum dtype": lambda xp, a, rows: a.sum(dtype="float64"),
    "mean": lambda xp, a, rows: np.mean(a, axis=1, keepdims=True),
    "max": lambda xp, a, rows: a.max(axis=0),
    "argmax": lambda xp, a, rows: a.argmax(axis=1),
    "any": lambda xp, a, rows: (a > 3).any(axis=0),
    "matmul": lambda xp, a, rows: np.matmul(a, a.T),
    "dot": lambda xp, a, rows: a.dot(a[0]),
    "norm": lambda xp, a, rows: xp.linalg.norm(a),
    "concatenate": lambda xp, a, rows: np.concatenate([a, a[:1]]),
    "where": lambda xp, a, rows: xp.where(a > 2, a, -a),
    "isclose": lambda xp, a, rows: xp.allclose(a, a + 1),
    "equal": lambda xp, a, rows: xp.array_equal(a, a),
    "view": lambda xp, a, rows: a[1:, ::2],
    "element": lambda xp, a, rows: a[1, 2],
    "rows": lambda xp, a, rows: a[rows],
    "pairs": lambda xp, a, rows: a[rows, rows],
    "mask": lambda xp, a, rows: a[a > 3],
    "reshape": lambda xp, a, rows: a.T.reshape(-1),
    "ravel": lambda xp, a, rows: a.ravel()[2:4],
    "zeros_like": lambda xp, a, rows: np.zeros_like(a, dtype="int32"),
    "full_like": lambda xp, a, rows: np.full_like(a, 7),
    "arange": lambda xp, a, rows: xp.arange(5, dtype="float32"),
    "flatnonzero": lambda xp, a, rows: xp.flatnonzero(a > 2),
    "clip": lambda xp, a, rows: a.clip(1, 3),
    "bits": lambda xp, a, rows: a.view("int32"),
    "tolist": lambda xp, a, rows: xp.asarray(a.tolist()),
    "iteration": lambda xp, a, rows: sum(a),
    "count": lambda xp, a, rows: xp.count_nonzero(a),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_numpy(name):
    host, rows = np.arange(6, dtype="float32").reshape(2, 3), np.array([1, 0])

    expected = np.asarray(FUNCTIONS[name](np, host, rows))
    result = FUNCTIONS[name](cupy, cupy.asarray(host), cupy.asarray(rows))

    assert isinstance(result, cupy.ndarray)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(result.get(), expected, rtol=1e-6)


def test_what_an_array_is_needs_no_waiting():
    x = ready([[1, 2, 3]])
    x += 1

    assert (np.ndim(x), np.shape(x), np.size(x)) == (2, (1, 3), 3)
    assert np.result_type(x, np.float64) == np.float64
    assert cupy.get_array_module(x) is cupy
    assert cupy.get_array_module(np.ones(1)) is np
    np.testing.assert_array_equal(seen(x), [[1, 2, 3]])


def test_masked_ufunc_leaves_the_rest():
    x = ready([1, 2, 3])

    cupy.add(x, x, out=x, where=x > 1)

    np.testing.assert_array_equal(x.get(), [1, 4, 6])


def test_repeated_rows_add_up():
    x = ready([[1, 1], [1, 1]])

    cupy.add.at(x, cupy.asarray([0, 0]), cupy.asarray([[1, 2], [3, 4]], "f"))

    np.testing.assert_array_equal(x.get(), [[5, 7], [1, 1]])


def test_views_share_memory_and_copies_do_not():
    x = ready(np.arange(6)).reshape(2, 3)
    view = x[:, 1]
    view += 10

    np.testing.assert_array_equal(x.get(), [[0, 11, 2], [3, 14, 5]])
    assert cupy.may_share_memory(x, view)
    assert not cupy.may_share_memory(x, x.copy())
    assert x[1:].data.ptr - x.data.ptr == 12
    assert x[1:].base is x.base
    assert not x.T.flags.c_contiguous
    assert x.T.flags.f_contiguous
    assert x.data.ptr % 256 == 0


@pytest.mark.parametrize("order", ["C", "F"])
def test_strided_arrays_come_and_go(order):
    host = np.asarray(np.arange(6, dtype="float32").reshape(2, 3), order=order)

    np.testing.assert_array_equal(cupy.asarray(host).get(), host)
    np.testing.assert_array_equal(cupy.asarray(host)[:, 1:].get(), host[:, 1:])
    np.testing.assert_array_equal(cupy.asarray(host).T.get(), host.T)
    out = np.empty((2, 3), "float32", order=order)
    np.testing.assert_array_equal(cupy.asarray(host, order="C").get(out=out), host)


def test_random_numbers_are_repeatable():
    first, second = (
        cupy.random.default_rng(7).standard_normal(5, dtype=np.float32).get()
        for _ in range(2)
    )

    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, second)


def test_memory_of_others_can_be_an_array():
    host = np.arange(4, dtype="float32")
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host)
    x = cupy.ndarray((2,), "float32", cupy.cuda.MemoryPointer(memory, 8))

    x += 1
    cupy.cuda.Device().synchronize()

    np.testing.assert_array_equal(host, [0, 1, 3, 4])

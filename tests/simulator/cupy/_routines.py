"""Functions of the module: those that gradient code calls, not all of CuPy's."""

from __future__ import annotations

import numpy as np

from . import _indexing, _transfer
from ._compute import late
from ._ndarray import ndarray

UFUNCS = (
    *("add", "divide", "exp", "floor", "log"),
    *("maximum", "minimum", "multiply", "sqrt", "subtract"),
)


class ufunc:
    """A function of elements, as late as all work."""

    def __init__(self, _function):
        self._function, self.name = _function, f"cupy_{_function.__name__}"
        self.nin, self.nout, self.nargs = _function.nin, 1, _function.nargs
        self.__name__, self.__doc__ = _function.__name__, _function.__doc__

    def __call__(self, *args, out=None, where=None, casting="same_kind", **kwargs):
        if len(args) == self.nargs:
            *args, out = args
        where = None if where is True else where
        return late(
            self._function, *args, out=out, where=where, casting=casting, **kwargs
        )

    def at(self, a, indices, b=None):
        """Change elements, also several times one."""
        _indexing.at(self._function, a, indices, b)


for _name in UFUNCS:
    globals()[_name] = ufunc(getattr(np, _name))


# Creation.


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    dtype = np.asarray(fill_value).dtype if dtype is None else dtype
    new = empty(shape, dtype, order)
    new.fill(fill_value)
    return new


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    if not isinstance(prototype, ndarray):
        raise TypeError(f"Unsupported type {type(prototype)}")
    model = prototype._host
    like = np.empty_like(model, dtype, order, shape=shape)
    return empty(like.shape, like.dtype, "F" if like.flags.fnc else "C")


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    new = empty_like(a, dtype, order, None, shape)
    new.fill(fill_value)
    return new


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    return full_like(a, 0, dtype, order, None, shape)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0):
    if not isinstance(obj, ndarray):
        return _transfer.array(obj, dtype, order, ndmin)
    new = obj.astype(obj.dtype if dtype is None else dtype, order, copy=bool(copy))
    if order in ("C", "F") and not new.flags[f"{order}_CONTIGUOUS"]:
        new = new.copy(order)
    return new.reshape((1,) * (ndmin - new.ndim) + new.shape) if ndmin else new


def asarray(a, dtype=None, order=None):
    return array(a, dtype, False, "K" if order is None else order)


def ascontiguousarray(a, dtype=None):
    return array(a, dtype, False, "C", ndmin=1)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a, order=order)


def arange(start, stop=None, step=1, dtype=None):
    first, last = (0, start) if stop is None else (start, stop)
    return _transfer.array(np.arange(first, last, step, dtype))


def copyto(dst, src, casting="same_kind"):
    if not isinstance(dst, ndarray):
        raise TypeError(f"Unsupported type {type(dst)}")
    if isinstance(src, np.ndarray) and src.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    source = src.dtype if hasattr(src, "dtype") else np.min_scalar_type(src)
    if not np.can_cast(source, dst.dtype, casting):
        raise TypeError(
            f"Cannot cast {source} to {dst.dtype} in {casting} casting mode"
        )
    _indexing.assign(dst, dst._host, src)


def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    def join(*hosts):
        return np.concatenate(hosts, axis, dtype=dtype, casting=casting)

    return late(join, *_only_arrays(tup), out=out)


def stack(tup, axis=0, out=None):
    return late(lambda *hosts: np.stack(hosts, axis), *_only_arrays(tup), out=out)


def _only_arrays(arrays):
    for each in arrays:
        if not isinstance(each, ndarray):
            raise TypeError(f"Unsupported type {type(each)}")
    return arrays


# Sums and products.


def sum(a, axis=None, dtype=None, out=None, keepdims=False):
    return a.sum(axis, dtype, out, keepdims)


def dot(a, b, out=None):
    return late(np.dot, *_only_arrays((a, b)), out=out)


def matmul(*args, out=None):
    return late(np.matmul, *_only_arrays(args), out=out)


# Questions and choices.


def flatnonzero(a):
    return a.ravel().nonzero()[0]


def get_default_memory_pool():
    from .cuda.memory import _pool

    return _pool


__all__ = [
    *UFUNCS,
    "ufunc",
    *(
        name
        for name, value in list(globals().items())
        if getattr(value, "__module__", None) == __name__
        and not isinstance(value, ufunc)
        and not name.startswith("_")
        and name != "ufunc"
    ),
]

"""The array: NumPy memory that refuses to be taken for a NumPy array."""

from __future__ import annotations

import ctypes
import math
import operator
import sys

import numpy as np

from . import _compute, _dlpack, _indexing, _transfer
from ._compute import late
from .cuda import memory
from .cuda.device import Device
from .cuda.stream import _queue_of, get_current_stream

_HOST = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)


def _call(name, module, args, kwargs):
    """Call the simulator's function of the same name as one of NumPy's."""
    found = sys.modules[__package__]
    for part in (*module.split(".")[1:], name):
        found = getattr(found, part, None)
    # Some functions are NumPy's own: it would only ask again.
    if not str(getattr(found, "__module__", "")).startswith(__package__):
        return NotImplemented
    if isinstance(kwargs.get("out"), tuple):
        (kwargs["out"],) = kwargs["out"]
    return found(*args, **kwargs)


class Flags:
    """How an array lies in memory."""

    def __init__(self, flags, owndata):
        self.c_contiguous = flags.c_contiguous
        self.f_contiguous = flags.f_contiguous
        self.owndata = owndata

    def __getitem__(self, name):
        return getattr(self, name.lower())


def _binary(function, *, swap=False):
    def method(self, other):
        if other is None or isinstance(other, str):
            return NotImplemented
        return late(function, *((other, self) if swap else (self, other)))

    return method


def _in_place(function):
    def method(self, other):
        return late(function, self, other, out=self)

    return method


def _scalar(convert):
    return lambda self: convert(self.get())


def from_dlpack(array):
    kind, number = array.__dlpack_device__()
    if kind != _dlpack.CUDA:
        raise ValueError(f"Unsupported array type: {kind}")
    with Device(number):
        # 0 would be no stream at all; 1 is the null stream.
        made = array.__dlpack__(stream=get_current_stream().ptr or 1)
        host = _dlpack.host_array(made)
        address = host.ctypes.data
        pointer = memory.MemoryPointer(
            memory.UnownedMemory(address, host.nbytes, host, number), 0
        )
        return ndarray(host.shape, host.dtype, pointer, host.strides)


class ndarray:
    """An array on a simulated device; see CuPy's for what it does.

    It holds a NumPy array of the same memory, `_host`, which only queued work may read
    or write. Queued work does not keep the memory: who drops an array whose memory
    another stream still uses is punished as on a device.
    """

    __slots__ = ("__weakref__", "_host", "_memory", "base")
    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if np.ndim(shape) == 0 else shape
        shape = tuple(operator.index(each) for each in shape)
        dtype = np.dtype(dtype)
        if dtype.kind not in "?biufcV" or dtype.hasobject:
            raise ValueError(f"Unsupported dtype {dtype}")
        if min(shape, default=0) < 0:
            raise ValueError("Negative dimensions are not allowed")
        nbytes = math.prod(shape) * dtype.itemsize
        if memptr is None:
            memptr = memory.MemoryPointer(memory.Memory(nbytes), 0)
        self._memory, self.base = memptr.mem, None
        buffer = None
        if nbytes:
            left = memptr.mem.ptr + memptr.mem.size - memptr.ptr
            buffer = (ctypes.c_uint8 * left).from_address(memptr.ptr)
        order = "F" if order in ("F", "f") else "C"
        self._host = np.ndarray(shape, dtype, buffer, 0, strides, order)

    def _view(self, host):
        new = object.__new__(ndarray)
        new._host, new._memory = host, self._memory
        new.base = self if self.base is None else self.base
        return new

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    device = property(lambda self: Device(self._memory.device_id))
    flags = property(lambda self: Flags(self._host.flags, self.base is None))
    T = property(lambda self: self._view(self._host.T))

    @property
    def data(self):
        offset = self._host.ctypes.data - self._memory.ptr if self._memory.size else 0
        return memory.MemoryPointer(self._memory, offset)

    def __len__(self):
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return len(self._host)

    def __iter__(self):
        return (self[number] for number in range(len(self)))

    def __repr__(self):
        return repr(self.get())

    # To and from the host.

    def get(self, stream=None, order="C", out=None, blocking=True):
        return _transfer.get(self, stream, order, out, blocking)

    def set(self, arr, stream=None):
        _transfer.set(self, arr, stream)

    def item(self):
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def __array__(self, dtype=None):
        raise TypeError(_HOST)

    def __bool__(self):
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. "
                "Use a.any() or a.all()"
            )
        return bool(self.get())

    __int__, __float__ = _scalar(int), _scalar(float)

    def __dlpack_device__(self):
        return _dlpack.CUDA, self._memory.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream != -1:  # -1: the caller needs no order
            event = get_current_stream().record()
            other = _queue_of(0 if stream is None else stream)
            other.put(lambda: event._queue.run(event._number))
        return _dlpack.capsule(self._host, self._memory, max_version)

    # NumPy's protocols.

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__":
            return NotImplemented
        return _call(ufunc.__name__, "numpy", inputs, kwargs)

    def __array_function__(self, func, types, args, kwargs):
        return _call(func.__name__, func.__module__, args, kwargs)

    # Views and copies.

    def copy(self, order="C"):
        new = _compute.new(self.shape, self.dtype, order)
        _indexing.assign(new, new._host, self)
        return new

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None:
            raise TypeError("casting is not supported yet")
        dtype = np.dtype(dtype)
        if not copy and dtype == self.dtype:
            return self
        new = _compute.new(self.shape, dtype, "F" if self._host.flags.fnc else "C")
        _indexing.assign(new, new._host, self)
        return new

    def view(self, dtype=None):
        if dtype is None:
            return self._view(self._host.view())
        return self._view(self._host.view(dtype))

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 else shape
        return self._view_or_copy(lambda host: host.reshape(shape, order=order))

    def ravel(self, order="C"):
        return self.reshape(-1, order=order)

    def _view_or_copy(self, change):
        new = change(self._host)
        if np.may_share_memory(new, self._host) or not self.size:
            return self._view(new)
        # NumPy copied, now; the device does it later.
        return late(change, self)

    def __getitem__(self, index):
        return _indexing.get(self, index)

    def __setitem__(self, index, value):
        _indexing.put(self, index, value)

    def fill(self, value):
        _indexing.assign(self, self._host, value)

    def nonzero(self):
        """Return where it is not zero; waits."""
        return tuple(_transfer.array(each) for each in self.get().nonzero())

    # Reductions.

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        return late(np.sum, self, axis=axis, dtype=dtype, out=out, keepdims=keepdims)

    def mean(self, axis=None, dtype=None, out=None, keepdims=False):
        return late(np.mean, self, axis=axis, dtype=dtype, out=out, keepdims=keepdims)

    def max(self, axis=None, out=None, keepdims=False):
        return late(np.max, self, axis=axis, out=out, keepdims=keepdims)

    def all(self, axis=None, out=None, keepdims=False):
        return late(np.all, self, axis=axis, out=out, keepdims=keepdims)

    def any(self, axis=None, out=None, keepdims=False):
        return late(np.any, self, axis=axis, out=out, keepdims=keepdims)

    def argmax(self, axis=None, out=None, dtype=None, keepdims=False):
        return late(np.argmax, self, axis=axis, out=out, keepdims=keepdims)

    def __matmul__(self, other):
        return late(np.matmul, self, other)


for _name, _function in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
}.items():
    setattr(ndarray, f"__{_name}__", _binary(_function))
    setattr(ndarray, f"__r{_name}__", _binary(_function, swap=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_function))
ndarray.__eq__, ndarray.__gt__ = _binary(np.equal), _binary(np.greater)
ndarray.__hash__ = None

_compute.kinds.append(ndarray)

"""Functions of NumPy, queued: the result's shape and dtype are known at once."""

from __future__ import annotations

import numpy as np

from .cuda import device
from .cuda.stream import _queue_of

# Arrays of the simulator; `_ndarray` puts its class here, to be imported downward only.
kinds = []


def is_array(value):
    """Whether this is an array of the simulator."""
    return isinstance(value, tuple(kinds))


def new(shape, dtype=float, order="C"):
    """Return a new, unwritten array on the current device."""
    return kinds[0](shape, dtype, order=order)


def check_device(array):
    """Raise unless an array is on the current device."""
    current = device.get_device_id()
    if array._memory.device_id != current:
        raise ValueError(
            f"Array device must be same as the current device: array device = "
            f"{array._memory.device_id} while current = {current}"
        )


def operand(value):
    """Return what NumPy may be given for an operand: no array of the host."""
    if is_array(value):
        check_device(value)
        return value._host
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    raise TypeError(f"Unsupported type {type(value)}")


def queue(action):
    """Queue an action on the current stream; NumPy's warnings are not CUDA's."""

    def quiet():
        with np.errstate(all="ignore"):
            action()

    _queue_of().put(quiet)


def late(function, *operands, out=None, where=None, casting="same_kind", **options):
    """Queue a function of arrays and scalars; return the array it will write.

    Args:
        function: Of NumPy, of the operands and the options.
        operands: Arrays of the simulator, scalars.
        out: Where to write; a new array by default.
        where: Array of bools, where to write; everywhere by default.
        casting: Of the result to ``out``.
        options: Neither arrays nor of an effect on the host.
    """
    values = [operand(each) for each in operands]
    shape, dtype = _result(function, values, options)
    if out is None:
        out = new(shape, dtype)
    else:
        _check_out(out, shape, dtype, casting)
    target, mask = out._host, True if where is None else operand(where)

    def action():
        result = function(*values, **options)
        np.copyto(target, result, casting="unsafe", where=mask)

    queue(action)
    return out


def _check_out(out, shape, dtype, casting):
    if not is_array(out):
        raise TypeError(f"Unsupported type {type(out)}")
    check_device(out)
    if np.broadcast_shapes(shape, out.shape) != out.shape:
        raise ValueError(f"Out shape is mismatched: {out.shape} for {shape}")
    if not np.can_cast(dtype, out.dtype, casting):
        raise TypeError(f"Cannot cast from {dtype!r} to {out.dtype!r} by {casting!r}")


def _result(function, values, options):
    """Return shape and dtype of a result: from zeros, the true values come later."""
    elementwise = isinstance(function, np.ufunc) and function.signature is None
    with np.errstate(all="ignore"):
        model = np.asarray(
            function(*(_zeros(each, elementwise) for each in values), **options)
        )
    if elementwise:
        return np.broadcast_shapes(*map(np.shape, values)), model.dtype
    return model.shape, model.dtype


def _zeros(value, tiny):
    if not isinstance(value, np.ndarray):
        return value
    shape = (1,) * value.ndim if tiny else value.shape
    return np.broadcast_to(np.zeros((), value.dtype), shape)

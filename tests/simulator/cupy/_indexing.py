"""What `array[index]` reads and writes."""

from __future__ import annotations

import numpy as np

from . import _compute, _transfer
from ._compute import is_array, late, operand, queue


def tuple_of(index):
    """Return an index as a tuple for which NumPy always answers with an array."""
    index = index if isinstance(index, tuple) else (index,)
    return index if any(each is ... for each in index) else (*index, ...)


def is_fancy(index):
    """Whether an index has arrays or lists, so that elements are copied."""
    index = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, (list, np.ndarray)) or is_array(each) for each in index)


def get(array, index):
    """Return a view, or a copy of the elements that arrays or masks choose."""
    if not is_fancy(index):
        return array._view(array._host[tuple_of(index)])
    arrays, rebuild = _split(index)
    if any(each.dtype == bool for each in arrays):
        # How many elements a mask chooses, the host must know: CuPy waits, too.
        chosen = array.get()[rebuild([each.get() for each in arrays])]
        return _transfer.array(chosen)
    return late(lambda host, *found: host[rebuild(found)], array, *arrays)


def put(array, index, value):
    """Set elements."""
    if not is_fancy(index):
        assign(array, array._host[tuple_of(index)], value)
        return
    _scatter(array, index, value, lambda host, where, new: host.__setitem__(where, new))


def at(function, array, index, value):
    """Apply a ufunc of NumPy to elements, as often as they are named."""
    _scatter(array, index, value, function.at)


def _scatter(array, index, value, function):
    _compute.check_device(array)
    arrays, rebuild = _split(index)
    found, new, host = [operand(each) for each in arrays], operand(value), array._host
    queue(lambda: function(host, rebuild(found), new))


def _split(index):
    """Return the arrays of an index, and what makes an index of other arrays."""
    index = index if isinstance(index, tuple) else (index,)
    places = [
        place
        for place, each in enumerate(index)
        if isinstance(each, (list, np.ndarray)) or is_array(each)
    ]
    arrays = [
        index[place] if is_array(index[place]) else _transfer.array(index[place])
        for place in places
    ]

    def rebuild(found):
        new = list(index)
        for place, each in zip(places, found, strict=True):
            new[place] = each
        return tuple(new)

    return arrays, rebuild


def assign(array, target, value):
    """Queue the setting of part of an array, with any conversion.

    Args:
        array: The array.
        target: The part of its host array.
        value: An array of its device, or a scalar.
    """
    _compute.check_device(array)
    if is_array(value):
        source = operand(value)
        if np.broadcast_shapes(source.shape, target.shape) != target.shape:
            raise ValueError(
                f"could not broadcast input array from shape {source.shape} into "
                f"shape {target.shape}"
            )
    else:
        if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        with np.errstate(all="ignore"):
            source = np.asarray(value).astype(target.dtype)
    queue(lambda: np.copyto(target, source, casting="unsafe"))

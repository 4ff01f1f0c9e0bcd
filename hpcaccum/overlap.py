"""Find out whether arrays share memory, by their addresses.

The base of an array is not enough, as a view by `memoryview`, `numpy.frombuffer` or
DLPack has another one. CPU and device memory have one address space.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np

from hpcaccum.device import is_device

Span = tuple[int, int]

# Limit of the effort of an exact answer for two strided arrays; beyond, assume overlap.
_WORK = 10_000


def address(array: Any) -> int:
    """Return the address of the first element of an array."""
    if is_device(array):
        return int(array.data.ptr)
    return int(array.__array_interface__["data"][0])


def bounds(array: Any) -> Span:
    """Return the address of an array's lowest byte, and of the byte after its highest.

    They are equal if the array is empty.
    """
    low = high = address(array)
    if array.size == 0:
        return low, low
    for count, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (count - 1) * stride)
        high += max(0, (count - 1) * stride)
    return low, high + array.itemsize


def overlap(one: Any, other: Any) -> bool:
    """Whether the bounds of two arrays overlap, so that they may share memory."""
    if type(one) is type(other) is np.ndarray:
        return np.may_share_memory(one, other)
    (low, high), (begin, end) = bounds(one), bounds(other)
    return max(low, begin) < min(high, end)


def same_elements(one: Any, other: Any) -> bool:
    """Whether two arrays are the same elements in the same order; shapes may differ."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.size != other.size or not overlap(one, other):
        return False
    alike = (one.shape, one.strides) == (other.shape, other.strides)
    dense = one.flags.c_contiguous and other.flags.c_contiguous
    return (alike or dense) and address(one) == address(other)


def sharing(arrays: Mapping[Hashable, Any]) -> tuple[Any, Any] | None:
    """Return the keys of two arrays that share memory, or None."""
    owners = [_owner(array) for array in arrays.values()]
    if None not in owners and len(set(owners)) == len(owners):
        return None
    spans = [(*bounds(array), key) for key, array in arrays.items()]
    behind: list[tuple[int, Any]] = []
    for low, high, key in sorted(spans, key=lambda span: span[:2]):
        behind = [(end, other) for end, other in behind if end > low]
        for _, other in behind:
            if low < high and _exactly(arrays[other], arrays[key]):
                return other, key
        behind.append((high, key))
    return None


def crossing(arrays: Collection[Any], others: Collection[Any]) -> list[bool]:
    """Return for each array whether it may share memory with one of the others."""
    owners = {_owner(other) for other in others}
    mine = [_owner(array) for array in arrays]
    if None not in owners and None not in mine:
        return [owner in owners for owner in mine]
    spans = sorted(span for span in map(bounds, others) if span[0] < span[1])
    begins = [begin for begin, _ in spans]
    ends = list(itertools.accumulate((end for _, end in spans), max))
    found = []
    for low, high in map(bounds, arrays):
        # One that begins before this array ends may end after it begins.
        number = bisect.bisect_left(begins, high)
        found.append(low < high and number > 0 and ends[number - 1] > low)
    return found


def _owner(array: Any) -> int | None:
    """Return the identity of the NumPy array that owns the memory, or None."""
    while type(array) is np.ndarray:
        if array.base is None:
            return id(array) if array.flags.owndata else None
        array = array.base
    return None


def _exactly(one: Any, other: Any) -> bool:
    """Whether two arrays with overlapping bounds share a byte."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        # NumPy's annotations of max_work allow two values only.
        answer: Any = np.may_share_memory
        return bool(answer(one, other, max_work=_WORK))
    return True

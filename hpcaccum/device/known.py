"""What is known of arrays that come again, so that they are not checked again."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpcaccum.device.arrays import is_device
from hpcaccum.device.tables import RECENT, stream_key

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

T = TypeVar("T")

# All that a check of an array on a device, or a table, reads of it.
_FACTS = operator.attrgetter("data.ptr", "data.device_id", "dtype", "shape", "strides")


class Known(Generic[T]):
    """Results of checks of sets of arrays on a device, and tables of these.

    To check hundreds of arrays takes longer than to launch a kernel. A result is found
    again by all that the checks have read: it is valid for any arrays of which this is
    equal, so no array is kept alive. Like a table, it belongs to a stream. Several
    threads may use it.

    Args:
        most: How many results to keep.
    """

    def __init__(self, most: int = RECENT) -> None:
        self._most = most
        self._results: dict[Hashable, T] = {}

    def find(self, arrays: Collection[Any], *more: Hashable) -> Entry[T]:
        """Return the entry of these arrays."""
        kinds = dict(zip(map(type, arrays), arrays, strict=True))
        if not all(map(is_device, kinds.values())):
            return Entry(self, None, None)
        key = (stream_key(), more, *map(_FACTS, arrays))
        return Entry(self, key, self._results.get(key))

    def keep(self, key: Hashable, result: T) -> None:
        """Keep a result."""
        # All at once, which needs no lock. More sets in turn than that are seldom.
        if len(self._results) >= self._most:
            self._results.clear()
        self._results[key] = result

    def clear(self) -> None:
        """Drop all results."""
        self._results.clear()


class Entry(Generic[T]):
    """The place of a result among those that are known.

    Attributes:
        result: None if it is not known.
    """

    __slots__ = ("_key", "_known", "result")

    def __init__(self, known: Known[T], key: Hashable, result: T | None) -> None:
        self._known, self._key, self.result = known, key, result

    def keep(self, result: T) -> T:
        """Keep a result, if the arrays were on a device; return it."""
        if self._key is not None:
            self._known.keep(self._key, result)
        return result

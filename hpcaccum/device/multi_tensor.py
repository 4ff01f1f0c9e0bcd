"""Launches over many arrays at once.

They move named arrays to and from a flat buffer, add them to it, or find the largest
absolute value of each array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.device import kernels
from hpcaccum.device.arrays import cupy
from hpcaccum.device.tables import KINDS, RECENT, Chunks, RecentTables, chunked, upload
from hpcaccum.layout import Layout

# Elements that a block reads for one result. Blocks of fewer would wait for each other,
# as they all change one word. (On an H100, 256 MiB take twice as long by 4096.)
_MOST_OF_A_RESULT = 16384


class _Table(NamedTuple):
    """What a launch over several arrays reads."""

    # On the device; a row of 4 int64 for each: address, offset, elements, dtype.
    arrays: Any
    chunks: Chunks


class PointerTable:
    """Moves named arrays to or from a flat buffer of their device, in one launch.

    Launches go to the current stream. The caller has checked the arrays: contiguous, on
    the current device, of the layout's shapes. The buffer may be of any dtype.
    """

    def __init__(self, layout: Layout) -> None:
        sizes = {name: math.prod(layout.shapes[name]) for name in layout}
        # Arrays that are packed while others are computed have a table each.
        most = RECENT + 2 * len(layout)
        chunks = RecentTables(lambda names: chunked([sizes[n] for n in names]), most)

        def make(names: tuple[str, ...], found: tuple[tuple[int, int], ...]) -> _Table:
            rows = [
                (address, layout.offsets[name], sizes[name], kind)
                for name, (address, kind) in zip(names, found, strict=True)
            ]
            # A launch needs a block, so no arrays are one empty array.
            return _Table(upload(rows or [(0, 0, 0, 0)]), chunks(names))

        self._chunks, self._tables = chunks, RecentTables(make, most)

    def clear(self) -> None:
        """Release memory on the device. All launches must have ended."""
        self._chunks.clear()
        self._tables.clear()

    def pack(self, flat: Any, arrays: Mapping[str, Any]) -> None:
        """Copy arrays to the flat buffer, converted to its dtype."""
        self._launch("pack", flat, arrays)()

    def unpack(self, flat: Any, arrays: Mapping[str, Any]) -> None:
        """Copy the flat buffer to arrays, as their dtypes; an overflow is infinity."""
        self.unpacking(flat, arrays)()

    def unpacking(self, flat: Any, arrays: Mapping[str, Any]) -> Callable[[], object]:
        """Prepare an `unpack`; return what queues it."""
        return self._launch("unpack", flat, arrays)

    def addition(
        self,
        flat: Any,
        arrays: Mapping[str, Any],
        scale: float = 1.0,
        *,
        first: bool = False,
    ) -> Callable[[], object]:
        """Prepare to add arrays, times ``scale``, to the buffer; return what queues it.

        The buffer is of float32 or float64. If ``first``, it is overwritten.
        """
        factor = flat.dtype.type(scale)
        return self._launch("multi_accumulate", flat, arrays, factor, np.int32(first))

    def _launch(
        self, kernel: str, flat: Any, arrays: Mapping[str, Any], *scalars: Any
    ) -> Callable[[], object]:
        found = [(array.data.ptr, KINDS[array.dtype]) for array in arrays.values()]
        table = self._tables(tuple(arrays), tuple(found))
        return kernels.prepare(
            kernel,
            flat.dtype,
            table.chunks.blocks,
            *(flat, table.arrays, *table.chunks, *scalars),
        )


def largest(arrays: Sequence[Any]) -> list[float]:
    """Return the largest absolute value of each array; NaN if the array has one.

    One launch and one copy to the host for all arrays, of dtypes that kernels read. The
    host waits for the current stream.
    """
    if not arrays:
        return []
    module = cupy()
    dense = [module.ascontiguousarray(array) for array in arrays]
    rows = upload([(each.data.ptr, 0, each.size, KINDS[each.dtype]) for each in dense])
    chunks = chunked([each.size for each in dense], _MOST_OF_A_RESULT)
    found = module.zeros(len(dense), np.float64)
    kernels.prepare("largest", found.dtype, chunks.blocks, found, rows, *chunks)()
    return found.get().tolist()  # type: ignore[no-any-return]

"""Launches over many arrays at once, whose addresses are in a table on the device.

A launch costs microseconds, as much as moving a megabyte. So one launch moves all the
hundreds of small gradients of a model: each block of it moves one chunk of one array.
The idea is that of multi-tensor launches in NVIDIA's Apex.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.device import kernels
from hpcaccum.device.arrays import check_array, cupy, is_device
from hpcaccum.dtypes import BFLOAT16
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from hpcaccum.layout import Layout

# A dtype's number in a table.
_KINDS = {
    np.dtype(np.float32): 0,
    np.dtype(np.float64): 1,
    np.dtype(np.float16): 2,
    BFLOAT16: 3,
}

# Elements that one block moves: enough to hide the cost of starting it, and few enough
# that a gradient of 100 MB occupies every multiprocessor.
_CHUNK = 16384
# cudaStreamPerThread of the CUDA runtime.
_PER_THREAD = 2
# So many tables of all arrays are kept: gradients have the same addresses every step,
# or a few that alternate.
_REMEMBERED = 8


class Table(NamedTuple):
    """The tables that a launch over several arrays reads.

    Attributes:
        arrays: On the device; a row of 4 int64 per array: address, offset in the flat
            buffer, elements, kind of dtype.
        chunks: On the device; a row of 2 int64 per chunk: row of ``arrays``, first
            element.
        chunk: The most elements that a chunk has.
        blocks: Number of chunks; at least one, which may be empty.
    """

    arrays: Any
    chunks: Any
    chunk: int
    blocks: int


class PointerTable:
    """Moves named arrays to or from a flat buffer of their device, in one launch.

    Launches go to the current stream. Not for several threads at once. The caller has
    checked the arrays: contiguous, on the current device, of the layout's shapes.

    Args:
        layout: The places of the arrays in the flat buffer, which may be of any dtype.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sizes = {name: math.prod(layout.shapes[name]) for name in layout}
        self.clear()

    def clear(self) -> None:
        """Release memory on the device. All launches must have ended."""
        # Arrays that are packed while others are computed have a table each.
        most = _REMEMBERED + 2 * len(self._layout)
        self._arrays, self._chunks = _Recent(most), _Recent(most)

    def table(self, arrays: Mapping[str, Any]) -> Table:
        """Return the table for all or some of the layout's arrays."""
        stream = _stream()
        names = tuple(arrays)
        places = tuple(
            (array.data.ptr, _KINDS[array.dtype]) for array in arrays.values()
        )
        rows = self._arrays.get(
            (stream, names, places), lambda: self._array_rows(names, places)
        )
        chunks = self._chunks.get((stream, names), lambda: self._chunk_rows(names))
        return Table(rows, chunks, _CHUNK, len(chunks))

    def _array_rows(
        self, names: tuple[str, ...], places: tuple[tuple[int, int], ...]
    ) -> Any:
        rows = [
            (address, self._layout.offsets[name], self._sizes[name], kind)
            for name, (address, kind) in zip(names, places, strict=True)
        ]
        # A launch needs a block, so no arrays are one empty array.
        return _upload(rows or [(0, 0, 0, 0)])

    def _chunk_rows(self, names: tuple[str, ...]) -> Any:
        rows = [
            (row, first)
            for row, name in enumerate(names)
            for first in range(0, self._sizes[name], _CHUNK)
        ]
        return _upload(rows or [(0, 0)])

    def pack(self, flat: Any, arrays: Mapping[str, Any], scale: float = 1.0) -> None:
        """Copy arrays to the flat buffer, times ``scale``, converted to its dtype."""
        self._launch("pack", flat, arrays, np.float32(scale))()

    def unpack(self, flat: Any, arrays: Mapping[str, Any], scale: float = 1.0) -> None:
        """Copy the flat buffer to arrays, times ``scale``, converted to their dtypes.

        Values that are too large for a dtype become infinite.
        """
        self.unpacking(flat, arrays, scale)()

    def unpacking(
        self, flat: Any, arrays: Mapping[str, Any], scale: float = 1.0
    ) -> Callable[[], object]:
        """Prepare an `unpack`; return what queues it."""
        return self._launch("unpack", flat, arrays, np.float32(scale))

    def compile(self, packed: np.dtype[Any], unpacked: np.dtype[Any]) -> None:
        """Compile the kernels that pack into one dtype and unpack from another.

        Raises:
            DeviceUnavailableError: If that fails; names what is missing.
        """
        kernels.kernel(f"pack_{kernels.SUFFIXES[packed]}")
        kernels.kernel(f"unpack_{kernels.SUFFIXES[unpacked]}")

    def accumulate(
        self, flat: Any, arrays: Mapping[str, Any], scale: float = 1.0
    ) -> None:
        """Add arrays, times ``scale``, to the flat buffer of float32 or float64."""
        self.addition(flat, arrays, scale)()

    def addition(
        self,
        flat: Any,
        arrays: Mapping[str, Any],
        scale: float = 1.0,
        *,
        first: bool = False,
    ) -> Callable[[], object]:
        """Prepare an `accumulate`; return what queues it.

        Args:
            flat: Of float32 or float64.
            arrays: The addends.
            scale: A factor.
            first: Overwrite the places of the arrays instead of adding to them.
        """
        factor = flat.dtype.type(scale)
        return self._launch("multi_accumulate", flat, arrays, factor, np.int32(first))

    def _launch(
        self, kernel: str, flat: Any, arrays: Mapping[str, Any], *scalars: Any
    ) -> Callable[[], object]:
        table = self.table(arrays)
        return functools.partial(
            kernels.kernel(f"{kernel}_{kernels.SUFFIXES[flat.dtype]}"),
            (table.blocks,),
            (kernels.THREADS,),
            (flat, table.arrays, table.chunks, np.int64(table.chunk), *scalars),
        )


def check_device_array(
    what: str, array: Any, shape: tuple[int, ...], dtypes: Any
) -> None:
    """Raise InvalidArgumentError unless kernels can use this array."""
    if not is_device(array):
        raise InvalidArgumentError(
            f"{what} must be an array on the device, got {type(array).__name__}"
        )
    if array.shape != shape:
        raise InvalidArgumentError(f"{what} must have shape {shape}, got {array.shape}")
    check_array(what, array, dtypes)


def _stream() -> tuple[int, int]:
    """Return a key of the current stream.

    A table belongs to the stream that copied it to the device. Another stream could
    read it too early, or after its memory was reused.
    """
    pointer = cupy().cuda.get_current_stream().ptr
    # The default streams of all threads have this address.
    return pointer, threading.get_ident() if pointer == _PER_THREAD else 0


class _Recent:
    """A cache of a few results by key; drops the least recently used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result for a key; make it if it is not known."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _upload(rows: Sequence[tuple[int, ...]]) -> Any:
    """Copy a table to the device, without waiting for it."""
    return cupy().asarray(np.array(rows, np.int64))

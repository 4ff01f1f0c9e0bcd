"""Launches over many arrays at once, whose addresses the device reads from a table.

A launch costs microseconds, as much as moving a megabyte: a model's hundreds of small
gradients are therefore moved by one launch. Each block of it moves one chunk of one
array. The idea is that of multi-tensor launches in NVIDIA's Apex.
"""

from __future__ import annotations

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

# Elements that one block moves: enough that its beginning and its end are cheap, and
# few enough that a gradient of 100 MB is work for every multiprocessor.
_CHUNK = 16384
# cudaStreamPerThread of the CUDA runtime.
_PER_THREAD = 2
# Gradients lie at the same places every step, or at a few that alternate.
_REMEMBERED = 8


class Table(NamedTuple):
    """What a launch over several arrays is told.

    Attributes:
        arrays: On the device; a row of 4 int64 for each: address, offset in the flat
            buffer, elements, kind of dtype.
        chunks: On the device; a row of 2 int64 for each: row of ``arrays``, first
            element.
        chunk: Elements of a chunk at most.
        blocks: How many chunks there are; at least one, which may be empty.
    """

    arrays: Any
    chunks: Any
    chunk: int
    blocks: int


class PointerTable:
    """Moves named arrays of one device to a flat buffer there, or back, in one launch.

    Launches go to the current stream. Not for several threads at once. Arrays are
    taken to be checked: contiguous, on the current device, of the layout's shapes.

    Args:
        layout: Where in the flat buffer they lie; any dtype of the buffer will do.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sizes = {name: math.prod(layout.shapes[name]) for name in layout}
        self.clear()

    def clear(self) -> None:
        """Give up memory on the device; nothing that was launched may be left."""
        self._arrays, self._chunks = _Recent(), _Recent()

    def table(self, arrays: Mapping[str, Any]) -> Table:
        """Return the table for arrays, all or some of the layout's."""
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
        # No array at all: one that is empty.
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
        self._launch("pack", flat, arrays, np.float32(scale))

    def unpack(self, flat: Any, arrays: Mapping[str, Any], scale: float = 1.0) -> None:
        """Copy the flat buffer to arrays, times ``scale``, converted to their dtypes.

        What is too large for a dtype becomes infinity.
        """
        self._launch("unpack", flat, arrays, np.float32(scale))

    def compile(self, packed: np.dtype[Any], unpacked: np.dtype[Any]) -> None:
        """Compile what packs into one dtype and unpacks from another.

        Raises:
            DeviceUnavailableError: If that cannot be done; says what is missing.
        """
        kernels.kernel(f"pack_{kernels.SUFFIXES[packed]}")
        kernels.kernel(f"unpack_{kernels.SUFFIXES[unpacked]}")

    def accumulate(
        self,
        flat: Any,
        arrays: Mapping[str, Any],
        scale: float = 1.0,
        *,
        header: Any = None,
        local_step: int = 0,
        met: Any = None,
    ) -> None:
        """Add arrays, times ``scale``, to the flat buffer.

        Args:
            flat: Of float32 or float64.
            arrays: All of the layout, if there is a header.
            scale: A factor.
            header: On the device; if given, nothing is added when its step is greater
                than ``local_step``, and the first gradient of a round overwrites.
            local_step: Step of the arrays.
            met: On the device, one int64; if given, the step that was met.
        """
        factor = flat.dtype.type(scale)
        step = np.int64(local_step)
        self._launch("multi_accumulate", flat, arrays, factor, header, step, met)

    def _launch(
        self, kernel: str, flat: Any, arrays: Mapping[str, Any], *more: Any
    ) -> None:
        table = self.table(arrays)
        kernels.kernel(f"{kernel}_{kernels.SUFFIXES[flat.dtype]}")(
            (table.blocks,),
            (kernels.THREADS,),
            (flat, table.arrays, table.chunks, np.int64(table.chunk), *more),
        )


def check_device_array(
    what: str, array: Any, shape: tuple[int, ...], dtypes: Any
) -> None:
    """Raise InvalidArgumentError unless kernels may be given this array."""
    if not is_device(array):
        raise InvalidArgumentError(
            f"{what} must be an array on the device, got {type(array).__name__}"
        )
    if array.shape != shape:
        raise InvalidArgumentError(f"{what} must have shape {shape}, got {array.shape}")
    check_array(what, array, dtypes)


def _stream() -> tuple[int, int]:
    """Return what tells the current stream from others.

    A table belongs to the stream on which it was copied to the device: another one
    might read it too early, or when the memory is another's already.
    """
    pointer = cupy().cuda.get_current_stream().ptr
    # Every thread has a default stream of its own, of the same address.
    return pointer, threading.get_ident() if pointer == _PER_THREAD else 0


class _Recent:
    """The last few results, by key: the one that was asked for longest ago goes."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result for a key, made now if it is not known."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _upload(rows: Sequence[tuple[int, ...]]) -> Any:
    """Copy a table to the device; the host does not wait."""
    return cupy().asarray(np.array(rows, np.int64))

"""Copies of named arrays between the device and flat host memory.

One launch packs all arrays into a flat buffer on the device. The buffer is copied to
the host in pieces, so that the first piece can be used before the last one arrives. The
way back is the same in reverse order. Each direction has its own stream: a device can
copy in both directions at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.device import kernels
from hpcaccum.device.arrays import (
    Pinned,
    check_current,
    cupy,
    current_device,
    current_stream,
    new_event,
)
from hpcaccum.device.multi_tensor import PointerTable
from hpcaccum.dtypes import Array
from hpcaccum.layout import Layout


class Transfer:
    """Copies the arrays of a layout between the current device and host memory.

    The copies wait for the caller's current stream; the host does not. Not for several
    threads at once. ``sent`` and ``received`` are the dtypes of the two directions. If
    they are the same, both share one buffer on the device.
    """

    def __init__(
        self, layout: Layout, sent: np.dtype[Any], received: np.dtype[Any]
    ) -> None:
        module = cupy()
        self._device = current_device()
        self._table = PointerTable(layout)
        self._leaving: Any = module.zeros(layout.size, sent)
        # A piece may come back only after it has left, so its memory is free.
        self._coming: Any = self._leaving
        if received != sent:
            self._coming = module.zeros(layout.size, received)
        self._out = module.cuda.Stream(non_blocking=True)
        self._back = module.cuda.Stream(non_blocking=True)
        self._whole = slice(0, layout.size)
        # To cut a piece takes as long as to queue its copy.
        self._pieces: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._pinned: dict[int, Pinned] = {}
        self._read = False
        self._packed, self._returned = new_event(), new_event()
        # Recorded when the caller's stream no longer needs the flat buffers.
        self._free_from = new_event()
        current_stream().record(self._free_from)

    def check_device(self) -> None:
        """Raise InvalidArgumentError unless the current device is still the same."""
        check_current("the memory of earlier calls", self._device)

    def compile(self) -> None:
        """Compile the kernels now instead of during the first transfer."""
        for flat in self._leaving, self._coming:
            kernels.of_dtype("pack", flat.dtype)
        kernels.of_dtype("unpack", self._coming.dtype)

    def pin(self, memory: Array) -> None:
        """Pin host memory for DMA, until `free`. Idempotent."""
        address = memory.ctypes.data
        if address not in self._pinned:
            self._pinned[address] = Pinned(memory)

    def send(
        self,
        arrays: Mapping[str, Any],
        host: Array,
        pieces: Sequence[slice] | None = None,
    ) -> list[Any]:
        """Begin to copy arrays to the host; return an event for each piece.

        A piece is complete after the ``synchronize()`` of its event.
        """
        self._pack(self._leaving, arrays)
        current_stream().record(self._packed)
        self._out.wait_event(self._packed)
        events = []
        for piece in [self._whole] if pieces is None else pieces:
            part, _ = self._piece(piece)
            part.get(stream=self._out, out=host[piece], blocking=False)
            events.append(new_event())
            self._out.record(events[-1])
        return events

    def _piece(self, piece: slice) -> tuple[Any, Any]:
        """Return the same piece of both flat buffers."""
        key = piece.start, piece.stop
        if key not in self._pieces:
            self._pieces[key] = self._leaving[piece], self._coming[piece]
        return self._pieces[key]

    def pack(self, arrays: Mapping[str, Any]) -> Any:
        """Copy arrays to the buffer for results, on this stream; return that."""
        self._pack(self._coming, arrays)
        # The next call may use another stream.
        current_stream().record(self._free_from)
        return self._coming

    def _pack(self, flat: Any, arrays: Mapping[str, Any]) -> None:
        current_stream().wait_event(self._free_from)
        self._table.pack(flat, arrays)

    def fetch(self, host: Array, piece: slice) -> None:
        """Begin to copy a piece of host memory to the flat buffer on the device.

        The memory must not be changed before `settle`.
        """
        if not self._read:
            self._back.wait_event(self._free_from)
        _, part = self._piece(piece)
        part.set(host[piece], stream=self._back)
        self._read = True

    def deliver(self, arrays: Mapping[str, Any]) -> None:
        """Copy what `fetch` has copied to arrays; queued on the current stream."""
        self._back.record(self._returned)
        current_stream().wait_event(self._returned)
        self.unpack(arrays)

    def apply(self, operation: np.ufunc, number: float) -> None:
        """Multiply or divide the buffer that `pack` returned."""
        if number != 1:
            flat = self._coming
            operation(flat, flat.dtype.type(number), out=flat)

    def unpack(self, arrays: Mapping[str, Any]) -> None:
        """Copy the buffer that `pack` returned to arrays."""
        self._table.unpack(self._coming, arrays)
        current_stream().record(self._free_from)

    def settle(self) -> None:
        """Wait until the host memory that `fetch` reads may be changed."""
        if self._read:
            self._back.synchronize()
            self._read = False

    def settled(self) -> bool:
        """Whether `settle` would not wait."""
        if self._read and self._back.done:
            self._read = False
        return not self._read

    def free(self) -> None:
        """Free all memory, after waiting for the copies that use it."""
        with contextlib.ExitStack() as all_of_them:
            for pinned in self._pinned.values():
                all_of_them.callback(pinned.free)
            self.settle()
            self._out.synchronize()
            # Once released, the memory may belong to another array.
            self._free_from.synchronize()
        self._pinned.clear()
        self._pieces.clear()
        self._leaving = self._coming = None
        self._table.clear()

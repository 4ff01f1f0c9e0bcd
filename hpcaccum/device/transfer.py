"""Named arrays on their way between the device and flat host memory.

One launch packs all arrays into a flat buffer on the device; that is copied to the
host by pieces, so that whoever waits for the first need not wait for the last; and the
other way round. Each way has a stream of its own: a device copies both ways at once.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device.arrays import Pinned, cupy
from hpcaccum.device.multi_tensor import PointerTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.layout import Layout

Array = np.ndarray[Any, Any]


class Transfer:
    """Moves the arrays of a layout between the current device and host memory.

    The caller's streams are never waited for by the host, only by the copies.

    Args:
        layout: Of the flat buffers.
        sent: Dtype of what goes to the host.
        received: Dtype of what comes back.
    """

    def __init__(
        self, layout: Layout, sent: np.dtype[Any], received: np.dtype[Any]
    ) -> None:
        module = cupy()
        self._table = PointerTable(layout)
        self._leaving: Any = module.zeros(layout.size, sent)
        # A piece comes back after it left, so there is room for it.
        self._coming: Any = self._leaving
        if received != sent:
            self._coming = module.zeros(layout.size, received)
        self._out = module.cuda.Stream(non_blocking=True)
        self._back = module.cuda.Stream(non_blocking=True)
        self._whole = [slice(0, layout.size)]
        self._pinned: dict[int, Pinned] = {}
        self._read = False
        # When the caller's stream is done with the flat buffers.
        self._free_from = _stream().record()

    def compile(self) -> None:
        """Compile the kernels now, not in the middle of the first transfer."""
        for packed in (self._leaving.dtype, self._coming.dtype):
            self._table.compile(packed, self._coming.dtype)

    def pin(self, memory: Array) -> None:
        """Let the device reach this host memory by itself until `free`."""
        address = memory.ctypes.data
        if address not in self._pinned:
            self._pinned[address] = Pinned(memory)

    def send(
        self,
        arrays: Mapping[str, Any],
        host: Array,
        pieces: Sequence[slice] | None = None,
    ) -> list[Any]:
        """Begin to copy arrays to the host.

        Args:
            arrays: Checked; on return they may be changed by what is queued on the
                current stream. They must stay until one of the events is done.
            host: Flat; pinned, if the host is not to wait.
            pieces: Of ``host``, in the order in which they are wanted; one by default.
                What lies there beside the arrays becomes arbitrary.

        Returns:
            An event for each piece: after ``synchronize()`` it is there.
        """
        self._pack(self._leaving, arrays)
        self._out.wait_event(_stream().record())
        events = []
        for piece in self._whole if pieces is None else pieces:
            part = self._leaving[piece]
            part.get(stream=self._out, out=host[piece], blocking=False)
            events.append(self._out.record())
        return events

    def pack(self, arrays: Mapping[str, Any]) -> Any:
        """Copy arrays to the buffer in which results come back, and return it.

        Queued on the current stream, as all that uses the buffer must be.
        """
        self._pack(self._coming, arrays)
        return self._coming

    def _pack(self, flat: Any, arrays: Mapping[str, Any]) -> None:
        _stream().wait_event(self._free_from)
        self._table.pack(flat, arrays)

    def fetch(self, host: Array, piece: slice | None = None) -> None:
        """Begin to copy a piece of host memory to the flat buffer on the device.

        The memory must not be changed before `settle`.
        """
        piece = self._whole[0] if piece is None else piece
        if not self._read:
            self._back.wait_event(self._free_from)
        self._coming[piece].set(host[piece], stream=self._back)
        self._read = True

    def deliver(self, arrays: Mapping[str, Any]) -> None:
        """Copy what came back to arrays; queued on the current stream."""
        _stream().wait_event(self._back.record())
        self.unpack(arrays)

    def divide(self, divisor: int) -> None:
        """Divide what lies in the buffer that `pack` returned."""
        if divisor != 1:
            flat = self._coming
            np.divide(flat, flat.dtype.type(divisor), out=flat)

    def unpack(self, arrays: Mapping[str, Any]) -> None:
        """Copy the buffer that `pack` returned to arrays."""
        self._table.unpack(self._coming, arrays)
        self._free_from = _stream().record()

    def settle(self) -> None:
        """Wait until host memory that `fetch` reads may be changed."""
        if self._read:
            self._back.synchronize()
            self._read = False

    def settled(self) -> bool:
        """Whether `settle` would not wait."""
        if self._read and self._back.done:
            self._read = False
        return not self._read

    def free(self) -> None:
        """Give everything back, after waiting for what uses it."""
        with contextlib.ExitStack() as all_of_them:
            for pinned in self._pinned.values():
                all_of_them.callback(pinned.free)
            self.settle()
            self._out.synchronize()
            # The memory is another array's as soon as it is given up.
            self._free_from.synchronize()
        self._pinned.clear()
        self._leaving = self._coming = None
        self._table.clear()


def _stream() -> Any:
    return cupy().cuda.get_current_stream()

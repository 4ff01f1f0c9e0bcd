"""Gradients on their way from the device to a parameter server, parameters back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum.layout import Layout
    from hpcaccum.server.double_buffer import DoubleBuffer
    from hpcaccum.server.inbox import Inbox

Array = np.ndarray[Any, Any]


class DeviceLink:
    """One rank's way between its device and the host memory of a server.

    Takes memory on the device when it is first used, and pins that of the host.

    Args:
        layout: Of the parameters.
        pushed: Of a push: the gradients, and what else there is.
        inbox, parameters: Of the server.
    """

    def __init__(
        self, layout: Layout, pushed: Layout, inbox: Inbox, parameters: DoubleBuffer
    ) -> None:
        self._layout, self._pushed = layout, pushed
        self._inbox, self._parameters = inbox, parameters
        self._out: Transfer | None = None
        self._back: Transfer | None = None

    def push(self, grads: Mapping[str, Any], slot: Array) -> None:
        """Copy gradients to their places in a slot; what is between is arbitrary."""
        if self._out is None:
            self._inbox.pin()
            self._out = Transfer(self._pushed, slot.dtype, slot.dtype)
        for event in self._out.send(grads, slot):
            event.synchronize()

    def pull(self, into: Mapping[str, Any]) -> Callable[[Array], None]:
        """Return what copies parameters to arrays; nothing reads its argument later."""
        if self._back is None:
            self._parameters.pin()
            self._back = Transfer(self._layout, self._layout.dtype, self._layout.dtype)
        transfer = self._back

        def copy(flat: Array) -> None:
            transfer.fetch(flat)
            transfer.deliver(into)
            transfer.settle()

        return copy

    def free(self) -> None:
        """Give the device's memory back."""
        for transfer in (self._out, self._back):
            if transfer is not None:
                transfer.free()
        self._out = self._back = None

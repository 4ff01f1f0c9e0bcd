"""How a `Reducer` reduces device arrays that never enter CPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.device import Transfer
from hpcaccum.reducer.device import DeviceCalls
from hpcaccum.reducer.signature import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpcaccum.reducer.schedule import Call


class DeviceOnlyCalls(DeviceCalls):
    """Finishes the calls of a schedule that takes arrays on the device only.

    They are packed into one buffer of the dtype of sums, in which the schedule reduces
    them. All is queued on the current stream. Results for CPU memory are copied to it.
    """

    # Whether `start` has packed arrays since the last call.
    _packed = False

    def prepare(self, inputs: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        """Do what may fail before other ranks wait."""
        self._schedule.check_usable()
        if not self._made:
            self._make()

    def _make(self) -> None:
        wide = self._schedule.received.dtype
        self._transfer = Transfer(self._layout, wide, wide)
        self._transfer.compile()
        self._made = True

    def start(self, name: str, inputs: Mapping[str, Any]) -> Iterable[str]:
        """Pack an array, and return nothing: a sum cannot begin before the call."""
        self._transfer.pack(inputs)
        self._packed = True
        return ()

    def finish(self, call: Call) -> bool:
        """Do as `Schedule.finish`, after `prepare`."""
        packed, self._packed = self._packed, False
        if call.signature == FAILED or not (packed or call.inputs):
            return self._schedule.finish(call)
        return self._finish_directly(call)

"""How a `Reducer` reduces device arrays.

They pass through the schedule's own CPU memory in a pipeline: while one bucket is
copied from the device, the ranks reduce the one before, and the one before that is
copied back. If ``cuda_aware=True`` permits it, MPI is given device memory instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hpcaccum.device import Transfer, copyto, is_device
from hpcaccum.layout import Layout
from hpcaccum.reducer.schedule import Call, Schedule
from hpcaccum.reducer.signature import FAILED
from hpcaccum.reducer.staging import copy

# Bytes from which on CPU memory is pinned; less is copied faster than pinned.
_PIN = 64 << 10


def _first_is_device(arrays: Mapping[str, Any]) -> bool:
    # Inputs has checked that all arrays are on the device, or none.
    return is_device(next(iter(arrays.values()), None))


class DeviceCalls:
    """Finishes the calls of a reducer whose inputs or results may be on the device.

    The device reads and writes the schedule's memory directly, without another copy in
    CPU memory. Each rank decides independently; others may contribute CPU arrays.
    """

    def __init__(self, layout: Layout, schedule: Schedule) -> None:
        self._layout, self._schedule = layout, schedule
        self._made = False
        # What `start` was given: names, events of copies from the device, and arrays,
        # which must live until their event.
        self._started: deque[tuple[str, Any, Mapping[str, Any]]] = deque()

    def prepare(self, inputs: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        """Do what may fail, if the device is needed, before other ranks wait."""
        # Most calls pass no arrays: these are in the schedule's memory already.
        needed = (inputs and _first_is_device(inputs)) or (
            out and _first_is_device(out)
        )
        if not needed:
            return
        if not self._made:
            self._make()
        self._transfer.check_device()

    def _make(self) -> None:
        """Allocate memory on the device, and compile the kernels."""
        schedule, wide = self._schedule, self._schedule.received.dtype
        packed = wide if schedule.device_only else schedule.sent.dtype
        self._transfer = Transfer(self._layout, packed, wide)
        self._transfer.compile()
        self._made = True
        if schedule.takes_device_memory or schedule.device_only:
            return
        for memory in schedule.sent, schedule.received:
            if memory.nbytes >= _PIN:
                self._transfer.pin(memory)

    def start(self, name: str, inputs: Mapping[str, Any]) -> Iterable[str]:
        """Begin to copy an array to the schedule's memory; yield complete ones.

        Waits only for a device that cannot reach that memory directly.
        """
        if not self._made:
            self._schedule.copy_in(inputs)
            return (name,)
        event = None
        if _first_is_device(inputs):
            self._transfer.pin(self._schedule.sent)
            piece = self._layout.place(name)
            [event] = self._transfer.send(inputs, self._schedule.sent, [piece])
        else:
            self._schedule.copy_in(inputs)
        self._started.append((name, event, inputs))
        return self._complete()

    def _complete(self) -> Iterator[str]:
        # A schedule reduces what it is offered, and overwrites the last results: these
        # may still be on their way to the device.
        while self._started and self._transfer.settled():
            name, event, _ = self._started[0]
            if event is not None and not event.done:
                return
            self._started.popleft()
            yield name

    def _wait_for_started(self, number: int) -> None:
        """Wait for the started arrays of a bucket."""
        for bucket in self._schedule.buckets[number : number + 1]:
            inside = {name for name, _, _ in self._layout.overlaps(bucket)}
            while any(name in inside for name, _, _ in self._started):
                self._wait_for_next()

    def _wait_for_next(self) -> None:
        _, event, _ = self._started.popleft()
        if event is not None:
            event.synchronize()

    def finish(self, call: Call) -> bool:
        """Do as `Schedule.finish`, after `prepare`."""
        if not self._made:
            return self._schedule.finish(call)
        if self._started:
            call = call._replace(ready=self._wait_for_started)
        # Only all arrays together fill a bucket.
        if len(call.inputs) == len(self._layout) and _first_is_device(call.inputs):
            if self._schedule.takes_device_memory:
                return self._finish_directly(call)
            call = self._send(call)
        targets = call.out if _first_is_device(call.out) else {}
        if targets:
            call = call._replace(out={}, reduced=self._fetch)
        agreed = self._schedule.finish(call)
        while self._started:
            # Arrays without elements are in no bucket.
            self._wait_for_next()
        if targets and agreed:
            self._transfer.deliver(targets)
        elif targets:
            # Sums on their way to the device would overwrite the next gradients.
            self._transfer.settle()
        return agreed

    def _send(self, call: Call) -> Call:
        """Begin to copy the inputs; return a call that waits for each bucket."""
        schedule = self._schedule
        events = self._transfer.send(call.inputs, schedule.sent, schedule.buckets)

        def ready(number: int) -> None:
            for event in events[number : number + 1]:
                event.synchronize()

        return call._replace(inputs={}, ready=ready)

    def _fetch(self, number: int) -> None:
        self._transfer.fetch(self._schedule.received, self._schedule.buckets[number])

    def _finish_directly(self, call: Call) -> bool:
        flat: Any = self._transfer.pack(call.inputs)
        self._transfer.apply(np.multiply, self._schedule.weight)
        agreed = self._schedule.reduce_device(call.signature, flat)
        if agreed:
            self._transfer.apply(np.divide, self._schedule.divisor)
            if _first_is_device(call.out):
                self._transfer.unpack(call.out)
            else:
                copyto(self._schedule.received, flat)
                copy(self._schedule.results, call.out)
        return agreed

    def settle(self) -> None:
        """Wait until other ranks may write to the schedule's memory again."""
        if self._made:
            self._transfer.settle()

    def free(self) -> None:
        """Free the device memory, before the schedule's memory is freed."""
        self._started.clear()
        if self._made:
            self._transfer.free()
            del self._transfer
            self._made = False


class DeviceOnlyCalls(DeviceCalls):
    """Finishes the calls of a schedule that takes arrays on the device only.

    They are packed into one buffer of the dtype of sums, in which the schedule reduces
    them. All is queued on the current stream. Results for CPU memory are copied to it.
    """

    def prepare(self, inputs: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        """Do what may fail before other ranks wait."""
        self._schedule.check_usable()
        if not self._made:
            self._make()

    def start(self, name: str, inputs: Mapping[str, Any]) -> Iterable[str]:
        """Pack an array, and return nothing: a sum cannot begin before the call."""
        self._transfer.pack(inputs)
        # Until the stream of the call has waited for the copy.
        self._started.append((name, None, inputs))
        return ()

    def finish(self, call: Call) -> bool:
        """Do as `Schedule.finish`, after `prepare`."""
        try:
            if call.signature == FAILED or not (self._started or call.inputs):
                return self._schedule.finish(call)
            return self._finish_directly(call)
        finally:
            self._started.clear()

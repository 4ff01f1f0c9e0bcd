"""How a `Reducer` reduces arrays of the device.

By way of the schedule's own host memory, in a pipeline: while one bucket is copied out,
the ranks reduce the one before, and the one before that is copied back. Or, where the
user says that MPI takes device memory, directly.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hpcaccum.device import Transfer, copyto, cupy, is_device
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import VARIABLE, cuda_awareness
from hpcaccum.reducer.call import NOTHING, copy, copy_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hpcaccum.layout import Layout
    from hpcaccum.reducer.call import Call
    from hpcaccum.reducer.schedules import Schedule

# Bytes from which on host memory is pinned; less is copied faster than that is done.
_PIN = 64 << 10


def _first_is_device(arrays: Mapping[str, Any]) -> bool:
    # Either all are or none is.
    return is_device(next(iter(arrays.values()), None))


def check_direct(direct: bool, schedule: str) -> None:
    """Raise InvalidArgumentError if MPI is to be given what it cannot take."""
    if not direct:
        return
    if schedule != "flat":
        raise InvalidArgumentError(
            f"cuda_aware=True is for schedule 'flat', got {schedule!r}: the others sum "
            f"in host memory"
        )
    answer = cuda_awareness()
    if not answer.aware:
        raise InvalidArgumentError(
            f"cuda_aware=True, but this MPI cannot take device memory, by "
            f"{answer.reason}; {VARIABLE}=1 says that it can"
        )


class DeviceExchange:
    """Finishes the calls of a reducer, whose arrays or results may be on the device.

    The device reads and writes the schedule's memory by itself, so that nothing is
    copied twice in the host. This rank alone decides; others may bring host arrays.

    Args:
        layout: Of the arrays.
        schedule: What reduces them.
        buckets: In which it works.
        direct: Whether MPI is given device memory, by that schedule.
    """

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        buckets: list[slice],
        direct: bool,
    ) -> None:
        self._layout, self._schedule, self._buckets = layout, schedule, buckets
        self._direct, self._made = direct, False
        # Names and arrays that `start` was given, with the event of those on a device.
        self._started: deque[tuple[str, Any, Mapping[str, Any]]] = deque()

    def prepare(self, brought: Mapping[str, Any], out: Mapping[str, Any]) -> None:
        """Do what may fail, if the device is needed, while others do not wait yet."""
        # Most calls bring and take nothing: their arrays lie where they are reduced.
        needed = (brought and _first_is_device(brought)) or (
            out and _first_is_device(out)
        )
        if needed and not self._made:
            self._make()

    def _make(self) -> None:
        """Take memory on the device, and compile what will be launched there."""
        sent, received = self._schedule.sent, self._schedule.received
        self._transfer = Transfer(self._layout, sent.dtype, received.dtype)
        self._transfer.compile()
        self._made = True
        for memory in () if self._direct else (sent, received):
            if memory.nbytes >= _PIN:
                self._transfer.pin(memory)

    def start(self, name: str, brought: Mapping[str, Any]) -> Iterable[str]:
        """Begin to copy an array to the schedule's memory.

        The host waits only for a device that cannot reach that memory directly.

        Returns:
            The names that were started and are complete now, each once.
        """
        self.prepare(brought, NOTHING)
        if not self._made:
            copy_in(brought, self._schedule.arrays, self._schedule.sent)
            return (name,)
        event = None
        if _first_is_device(brought):
            self._transfer.pin(self._schedule.sent)
            piece = self._layout.place(name)
            [event] = self._transfer.send(brought, self._schedule.sent, [piece])
        else:
            copy_in(brought, self._schedule.arrays, self._schedule.sent)
        self._started.append((name, event, brought))
        return self._arrived()

    def _arrived(self) -> Iterator[str]:
        # What is offered is reduced, over results that may still be copied back.
        while self._started and self._transfer.settled():
            name, event, _ = self._started[0]
            if event is not None and not event.done:
                return
            self._started.popleft()
            yield name

    def _wait_for_started(self, number: int) -> None:
        """Wait for what was started of a bucket."""
        for bucket in self._buckets[number : number + 1]:
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
        leaves = call.whole and _first_is_device(call.brought)
        if leaves and self._direct:
            return self._finish_directly(call)
        targets = call.out if _first_is_device(call.out) else NOTHING
        if leaves:
            sent = self._schedule.sent
            events = self._transfer.send(call.brought, sent, self._buckets)

            def ready(number: int) -> None:
                for event in events[number : number + 1]:
                    event.synchronize()

            call = call._replace(brought=NOTHING, whole=False, ready=ready)
        if targets:
            call = call._replace(out=NOTHING, arrived=self._fetch)
        agreed = self._schedule.finish(call)
        while self._started:
            # Arrays without elements are in no bucket.
            self._wait_for_next()
        if targets and agreed:
            self._transfer.deliver(targets)
        return agreed

    def _fetch(self, number: int) -> None:
        for bucket in self._buckets[number : number + 1]:
            self._transfer.fetch(self._schedule.received, bucket)

    def _finish_directly(self, call: Call) -> bool:
        flat: Any = self._transfer.pack(call.brought)
        # MPI knows nothing of streams.
        cupy().cuda.get_current_stream().synchronize()
        plain = call._replace(brought=NOTHING, whole=False, out=NOTHING, buffer=flat)
        agreed = self._schedule.finish(plain)
        if agreed:
            self._transfer.divide(self._schedule.divisor)
            if _first_is_device(call.out):
                self._transfer.unpack(call.out)
            else:
                copyto(self._schedule.received, flat)
                copy(self._schedule.results, call.out)
        return agreed

    def settle(self) -> None:
        """Wait until others may write to the schedule's memory again."""
        if self._made:
            self._transfer.settle()

    def free(self) -> None:
        """Give everything back, before the schedule's memory goes."""
        self._started.clear()
        if self._made:
            self._transfer.free()
            del self._transfer
            self._made = False

"""All ranks at once: by messages in pairs, or by the MPI library's allreduce."""

from __future__ import annotations

from typing import Any

from hpcaccum.device import current_stream
from hpcaccum.mpi import MPI
from hpcaccum.reducer.schedule import Call, MessageSchedule, Plan


class Flat(MessageSchedule):
    """The MPI library's nonblocking allreduce, bucket by bucket."""

    name = "flat"
    # Where nodes are joined by TCP, larger ones take up to 1.3 times as long.
    default_bucket_bytes = 1 << 20

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._requests: list[Any] = []

    def offer(self, count: int) -> None:
        """Begin to reduce these buckets."""
        for bucket in self.buckets[len(self._requests) : count]:
            result = self.received[bucket]
            source: Any = self.sent[bucket]
            if source.dtype != result.dtype or self.factor != 1:
                self._weigh(bucket)
                source = MPI.IN_PLACE
            self._requests.append(self._comm.Iallreduce(source, result))

    def collect(self, number: int) -> None:
        """Wait for the library, and divide."""
        self._wait(self._requests[number].Test)
        self._divide(self.buckets[number])
        if number + 1 == len(self.buckets):
            self._requests.clear()


class SmallFlat(MessageSchedule):
    """Messages between pairs of ranks, of data and signature together."""

    name = "flat"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, sums=plan.layout.size)

    def complete(self, call: Call) -> bool:
        """Sum all at once, and divide if all ranks make the same call."""
        self._weigh(slice(None))
        if not self._agree(call.signature):
            return False
        self._divide(slice(None))
        if call.reduced is not None:
            for number in range(len(self.buckets)):
                call.reduced(number)
        return True


class Blocking(MessageSchedule):
    """The MPI library's blocking allreduce, which may be given device memory.

    Open MPI takes device memory in blocking collective calls only. Such a call has no
    time limit, so all ranks first wait for each other and compare their signatures.
    Each rank passes device or CPU memory, independently of the others.
    """

    name = "flat"
    takes_device_memory = True

    def complete(self, call: Call) -> bool:
        """Wait for all ranks, then reduce all buckets."""
        if not self._agree(call.signature):
            return False
        self._collect_all(call)
        return True

    def collect(self, number: int) -> None:
        """Reduce a bucket in CPU memory."""
        bucket = self.buckets[number]
        self._weigh(bucket)
        self._comm.Allreduce(MPI.IN_PLACE, self.received[bucket])
        self._divide(bucket)

    def reduce_device(self, signature: int, buffer: Any) -> bool:
        """Wait for all ranks, then sum the buffer in place."""
        # MPI does not know streams.
        current_stream().synchronize()
        if not self._agree(signature):
            return False
        for bucket in self.buckets:
            self._comm.Allreduce(MPI.IN_PLACE, buffer[bucket])
        return True

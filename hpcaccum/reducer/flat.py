"""The MPI library's allreduce, of CPU memory and of device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import current_stream
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import MPI
from hpcaccum.reducer.schedule import MessageSchedule
from hpcaccum.reducer.signature import Digits

if TYPE_CHECKING:
    from hpcaccum.reducer.schedule import Call, Case, Plan


# The most bytes that are sent together with the signature.
_SMALL = 64 << 10


class Flat(MessageSchedule):
    """The MPI library's nonblocking allreduce, bucket by bucket."""

    name = "flat"
    # Where nodes are joined by TCP, larger ones take up to 1.3 times as long.
    default_bucket_bytes = 1 << 20

    @classmethod
    def preferred(cls, case: Case) -> bool:
        """Always: schedules that are faster for some cases precede it in the list."""
        return True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._requests: list[Any] = []

    def offer(self, count: int) -> None:
        """Begin to reduce these buckets."""
        for bucket in self.buckets[len(self._requests) : count]:
            result = self.received[bucket]
            source: Any = self.sent[bucket]
            if source.dtype != result.dtype or self.weight != 1:
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
    """The MPI library's nonblocking allreduce, of data and signature in one call.

    A second call would take a third longer: both take the time of their latency.
    """

    name = "flat"

    @classmethod
    def fits(cls, case: Case) -> bool:
        """Whether the data are one bucket, and so small that a copy costs little."""
        return case.nbytes <= min(_SMALL, case.bucket_bytes or _SMALL)

    @classmethod
    def preferred(cls, case: Case) -> bool:
        """As `Flat`, wherever it fits."""
        return True

    def __init__(self, plan: Plan) -> None:
        size, dtype = plan.layout.size, accumulation_dtype(plan.layout.dtype)
        self._digits = Digits(plan.group.size, dtype)
        self._message = np.zeros(size + self._digits.size + 1, dtype)
        super().__init__(plan, received=self._message[:size])
        signature: Any = self._message[size:-1]
        self._signature = memoryview(signature).cast("B")

    def complete(self, call: Call) -> bool:
        """Sum all at once, and divide if all ranks make the same call."""
        self._weigh(slice(None))
        self._signature[:], agreed = self._digits.of(call.signature)
        self._message[-1] = self.weight
        self._wait(self._comm.Iallreduce(MPI.IN_PLACE, self._message).Test)
        self._note_total(float(self._message[-1]))
        if self._signature != agreed:
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

"""The MPI library's allreduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import MPI
from hpcaccum.reducer.schedule import MessageSchedule

if TYPE_CHECKING:
    from hpcaccum.reducer.schedule import Case, Plan


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
            if source.dtype != result.dtype:
                np.copyto(result, source)
                source = MPI.IN_PLACE
            self._requests.append(self._comm.Iallreduce(source, result))

    def collect(self, number: int) -> None:
        """Wait for the library, and divide."""
        self._wait(self._requests[number].Test)
        self._divide(self.buckets[number])
        if number + 1 == len(self.buckets):
            self._requests.clear()

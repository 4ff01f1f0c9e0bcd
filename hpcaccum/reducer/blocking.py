"""The MPI library's blocking allreduce, for device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import current_stream
from hpcaccum.mpi import MPI
from hpcaccum.reducer.schedule import MessageSchedule

if TYPE_CHECKING:
    from hpcaccum.reducer.schedule import Call


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
        if not self._reached(self._compare(call.signature)):
            return False
        self._collect_all(call)
        return True

    def collect(self, number: int) -> None:
        """Reduce a bucket in CPU memory."""
        bucket = self.buckets[number]
        np.copyto(self.received[bucket], self.sent[bucket])
        self._comm.Allreduce(MPI.IN_PLACE, self.received[bucket])
        self._divide(bucket)

    def reduce_device(self, signature: int, buffer: Any) -> bool:
        """Wait for all ranks, then sum the buffer in place."""
        # MPI does not know streams.
        current_stream().synchronize()
        if not self._reached(self._compare(signature)):
            return False
        for bucket in self.buckets:
            self._comm.Allreduce(MPI.IN_PLACE, buffer[bucket])
        return True

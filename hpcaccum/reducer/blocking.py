"""The MPI library's blocking allreduce, for memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import MPI
from hpcaccum.reducer.call import copy, copy_in
from hpcaccum.reducer.schedules import Agreement, Flat

if TYPE_CHECKING:
    from hpcaccum.reducer.call import Call


class Blocking(Flat):
    """The MPI library's allreduce, bucket by bucket, where MPI takes device memory.

    Open MPI takes it in blocking collective calls only. Such a call has no deadline, so
    the ranks wait for each other before, and compare their signatures. A rank gives
    memory of its device or of the host, as it likes.
    """

    def offer(self, count: int) -> None:
        """Do nothing: no rank begins before all are there."""

    def finish(self, call: Call) -> bool:
        """Wait for all ranks, then reduce all buckets."""
        copy_in(call.brought, self.arrays, self.sent)
        if call.ready is not None:
            for number in range(len(self._buckets)):
                call.ready(number)
        agreement = Agreement(self._comm, call.signature)
        self._spin(agreement.request.Test, call.wait)
        if not agreement.reached:
            return False
        for number, bucket in enumerate(self._buckets):
            self._reduce(bucket, call.buffer)
            if call.arrived is not None:
                call.arrived(number)
        copy(self.results, call.out)
        return True

    def _reduce(self, bucket: slice, buffer: Any) -> None:
        if buffer is not None:
            self._comm.Allreduce(MPI.IN_PLACE, buffer[bucket])
            return
        np.copyto(self.received[bucket], self.sent[bucket])
        self._comm.Allreduce(MPI.IN_PLACE, self.received[bucket])
        self._divide(bucket)

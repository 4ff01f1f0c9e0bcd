"""Waits for requests of MPI."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from hpcaccum import WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import complete

from .acting import VAIN, until
from .support import WAIT, meet

TAG = 11


@pytest.mark.ranks(min=2)
def test_a_wait_that_fails_keeps_the_memory(comm, rank):
    place: np.ndarray | None = np.zeros(3)
    kept = weakref.ref(place)
    if rank == 0:
        begun = map(comm.Irecv, (place,), (1,), (TAG,))
        with pytest.raises(WaitTimeoutError, match=r"rank 1$"):
            complete(begun, Deadline(VAIN, "receive"), lambda: "rank 1")
        del begun
    place = None
    gc.collect()
    meet()
    if rank == 1:
        complete([comm.Isend(np.ones(3), 0, TAG)], Deadline(WAIT, "send"), str)
    if rank == 0:
        # MPI goes on while it looks for messages.
        until(lambda: not comm.Iprobe() and kept().all())
        complete([], Deadline(WAIT, "nothing"), str)
        assert kept() is None
    meet()


def test_what_is_begun_is_complete_afterwards(comm, rank, size):
    found = np.zeros(size, np.int64)
    begun = map(comm.Iallgather, (np.array([rank]),), (found,))
    complete(begun, Deadline(WAIT, "gather"), str)

    assert found.tolist() == list(range(size))

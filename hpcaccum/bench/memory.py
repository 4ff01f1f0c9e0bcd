"""Whether a size fits into this node."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.free_memory import free_memory
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum import Group

_SHM = "/dev/shm"
# Left to others, and for what MPI itself allocates.
_SPARE = 0.9


class Memory(NamedTuple):
    """What a benchmark needs, in multiples of its size.

    Attributes:
        shared: In windows, for each rank.
        shared_first: In windows of rank 0, beside that.
        shared_all: In windows of rank 0, for each rank there is.
        private: For each rank.
    """

    shared: float
    shared_first: float = 0
    shared_all: float = 0
    private: float = 0

    def missing(self, group: Group, nbytes: int) -> str | None:
        """Return what is missing on a node for this size, or None. Collective."""
        shared = self.shared * nbytes
        if group.rank == 0:
            shared += (self.shared_first + self.shared_all * group.size) * nbytes
        private = self.private * nbytes
        shared, private = (group.node.allreduce(each) for each in (shared, private))
        problem = _problem(shared, private)
        told = [each for each in group.allgather(problem, "memory") if each]
        return told[0] if told else None


def _problem(shared: float, private: float) -> str | None:
    # What is shared lies in memory too.
    needs = {
        _SHM: (shared, _free_shared()),
        "memory": (shared + private, free_memory()),
    }
    for where, (wanted, free) in needs.items():
        if wanted > _SPARE * free:
            return (
                f"needs {wanted / 2**30:.1f} GiB of {where} on "
                f"{MPI.Get_processor_name()}, {free / 2**30:.1f} GiB are free"
            )
    return None


def _free_shared() -> float:
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHM)
        return float(state.f_bavail * state.f_frsize)
    return float("inf")

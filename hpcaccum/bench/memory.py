"""Whether a size fits into the memory of a node."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from hpcaccum.free_memory import free_memory
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum import Group

_SHM = "/dev/shm"
# The rest is left to other programs and to libraries.
_SPARE = 0.9


class Memory(NamedTuple):
    """What a benchmark needs, in multiples of its size.

    Attributes:
        shared: Shared memory of each rank.
        shared_first: Shared memory of rank 0, in addition.
        shared_all: Shared memory of rank 0, in addition, times the number of ranks.
        private: Private memory of each rank.
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
        needed = group.node.allgather((shared, private))
        shared, private = map(sum, zip(*needed, strict=True))
        host = MPI.Get_processor_name()
        # Shared memory is memory, too.
        problem = shortage(f"{_SHM} on {host}", shared, _free_shared()) or shortage(
            f"memory on {host}", shared + private, free_memory()
        )
        return first_of(group, problem)


def shortage(where: str, wanted: float, free: float) -> str | None:
    """Return what is missing if ``wanted`` bytes do not fit, or None."""
    if wanted <= _SPARE * free:
        return None
    return f"needs {wanted / 2**30:.1f} GiB of {where}, {free / 2**30:.1f} GiB are free"


def first_of(group: Group, problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, or None. Collective."""
    return next(filter(None, group.allgather(problem, "memory")), None)


def _free_shared() -> float:
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHM)
        return float(state.f_bavail * state.f_frsize)
    return float("inf")

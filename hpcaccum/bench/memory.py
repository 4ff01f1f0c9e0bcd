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
# The rest is left to other programs and to MPI itself.
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
        problem = _problem(*map(sum, zip(*needed, strict=True)))
        problems = [each for each in group.allgather(problem, "memory") if each]
        return problems[0] if problems else None


def _problem(shared: float, private: float) -> str | None:
    # Shared memory is memory, too.
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

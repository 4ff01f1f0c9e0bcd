"""The start of training: the same variables, with the same values, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import copyto, to_host
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import DisagreementError, format_ranks
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group, complete
from hpcaccum.optimizers.variable import Variable

logger = logging.getLogger("hpcaccum")

# MPI libraries before MPI-4 count the elements of a message in 32 bits.
_CHUNK_BYTES = 1 << 30
# Number of names that a message lists.
_SHOWN = 5


def signature(variables: Iterable[Variable]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return what must be the same on all ranks: names, shapes and dtypes."""
    return [(var.name, var.shape, str(var.dtype)) for var in variables]


def warn_of_wider(what: str, variables: Sequence[Variable]) -> None:
    """Warn if some variables force the gradients of others into a wider dtype."""
    dtype = Layout.of({var.name: var.value for var in variables}).dtype
    wider = [var.name for var in variables if accumulation_dtype(var.dtype) == dtype]
    if len(wider) < len(variables):
        more = ", ..." if len(wider) > _SHOWN else ""
        logger.warning(
            "%s: all gradients are exchanged as %s, the dtype of %s%s (%d of %d "
            "variables); convert these, or give them a separate optimizer",
            what,
            dtype,
            ", ".join(map(repr, wider[:_SHOWN])),
            more,
            len(wider),
            len(variables),
        )


def broadcast(
    group: Group, variables: Iterable[Variable], what: str, root: int = 0
) -> None:
    """Set the variables of all ranks of a group to those of one rank. Collective."""
    for var in variables:
        buffer = np.array(to_host(var.value), order="C")
        data = _bytes(buffer)
        for start in range(0, data.size, _CHUNK_BYTES):
            piece = data[start : start + _CHUNK_BYTES]
            deadline = Deadline(None, f"{what}: broadcast of {var.name!r}")
            begun = group.comm.Ibcast(piece, root)
            complete([begun], deadline, lambda: "the other ranks of the group")
            group.broadcasts += 1
        if group.rank != root:
            copyto(var.value, buffer)


def compare(
    group: Group, variables: Sequence[Variable], ranks: Sequence[int], what: str
) -> None:
    """Raise unless the variables have the same bytes on all ranks. Collective."""
    checksums = [checksum(to_host(var.value)) for var in variables]
    everybody = group.allgather(checksums, what)
    for number, var in enumerate(variables):
        odd = [
            ranks[rank]
            for rank, theirs in enumerate(everybody)
            if theirs[number] != everybody[0][number]
        ]
        if odd:
            raise DisagreementError(
                f"{what}: variable {var.name!r} must start with the same values on all "
                f"ranks of a group: {format_ranks(odd)} unlike rank {ranks[0]}; or use "
                f"sync=True"
            )


def checksum(*values: object) -> int:
    """Return a number of 64 bits of arrays, and of the ``repr`` of other values."""
    # Imported here, as it is slow.
    import hashlib

    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, np.ndarray):
            found.update(repr((value.dtype, value.shape)).encode())
            found.update(_bytes(np.ascontiguousarray(value)).data)
        else:
            found.update(repr(value).encode())
    return int.from_bytes(found.digest(), "big")


def _bytes(contiguous: Array) -> Array:
    return contiguous.reshape(-1).view(np.uint8)

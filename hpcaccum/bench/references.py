"""A plain copy and a plain exchange, the measures of memory and of the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.bench.measure import COPY, EXCHANGE, Kind, check_equal, repeated
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum import Group
    from hpcaccum.dtypes import Array


def plain_copy(target: Array, source: Array, ranks: int) -> Kind:
    """Return the copy by all ranks at once that defines the floor of memory."""
    run = repeated(lambda: np.copyto(target, source))
    return Kind(COPY, run, reference=True, moves=2 * ranks * source.nbytes)


class RingExchange:
    """Every node sends a vector to the next one, and receives one. Collective.

    So every link is in use in both directions at once, whether the number of nodes is
    even or odd. The ranks of a node send one stripe each, by Isend and Irecv: one rank
    may be slower than the link. On one node there is nothing to send, and no kind.

    Args:
        group: The ranks.
        nbytes: Of a vector.

    Attributes:
        kinds: For a `measure.Case`.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        nodes, number = group.nodes, group.node_number
        self.kinds: list[Kind] = []
        self._peers: tuple[int, int] | None = None
        self._group, self._comm = group, group.comm.Dup()
        # Ranks that the smallest node does not have send nothing.
        width, place = min(map(len, nodes)), nodes[number].index(group.rank)
        stripe = np.array_split(np.arange(nbytes // 4), width)[min(place, width - 1)]
        if len(nodes) == 1 or place >= width:
            stripe = stripe[:0]
        before, after = (number - 1) % len(nodes), (number + 1) % len(nodes)
        pattern = (stripe % 64).astype(np.float32)
        self._mine, self._expected = pattern + number, pattern + before
        self._got = np.zeros_like(pattern)
        if stripe.size:
            self._peers = nodes[before][place], nodes[after][place]
        if len(nodes) > 1:
            self.kinds = [
                Kind(EXCHANGE, self._run, self._check, reference=True, crosses=nbytes)
            ]

    def __call__(self) -> None:
        """Exchange once."""
        if self._peers is None:
            return
        before, after = self._peers
        requests = [
            self._comm.Irecv(self._got, before),
            self._comm.Isend(self._mine, after),
        ]
        MPI.Request.Waitall(requests)

    def _run(self, inner: int) -> list[float]:
        # A rank that begins late finds what others have sent already: all is sent when
        # the last rank is done.
        (mine,) = repeated(self)(inner)
        return [max(self._group.comm.allgather(mine))]

    def _check(self) -> None:
        check_equal(self._got, self._expected)

    def forget(self) -> None:
        """Overwrite the result."""
        self._got[:] = np.nan

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()

"""The bytes that cross the link of each node, counted at its network interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcaccum.bench.interfaces import Interfaces, network
from hpcaccum.bench.references import RingExchange
from hpcaccum.bench.report import number_text
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum import Group
    from hpcaccum.dtypes import Array

T = TypeVar("T")

# An exchange of so many bytes between nodes must show in the counters, and not much
# else: bytes over their number. Headers and acknowledgements of TCP take 5 to 10 %.
_PROBE, _LEAST, _MOST = 1 << 20, 0.95, 1.5
# Other programs may send in between.
_ATTEMPTS = 5


class Links:
    """Counts what crosses the links of the nodes during an operation. Collective.

    Args:
        group: The ranks.
        interfaces: Of this rank's host.

    Attributes:
        names: The interfaces of each node.
        obstacle: Why nothing can be counted, the same on all ranks; None if it can.
    """

    def __init__(self, group: Group, interfaces: Interfaces | None = None) -> None:
        self._group = group
        self._interfaces = interfaces or Interfaces()
        self._leaders = [ranks[0] for ranks in group.nodes]
        # What the counting itself sends.
        self._idle = np.zeros((len(self._leaders), 2), np.int64)
        mine = network(), MPI.Get_processor_name(), self._interfaces.names
        everybody = group.allgather(mine, "interfaces of the hosts")
        found = [everybody[rank] for rank in self._leaders]
        self.names = [names for _, _, names in found]
        self.obstacle = self._unusable(found) or self._probe()

    def _unusable(self, found: Sequence[tuple[str, str, list[str]]]) -> str | None:
        seen: dict[str, int] = {}
        for leader, (name, host, names) in zip(self._leaders, found, strict=True):
            if not names:
                return f"{host} has no interface but loopback that can be read"
            if name in seen:
                both = format_ranks([seen[name], leader])
                return (
                    f"the nodes of {both} are one host, {host};\nwhat they exchange "
                    f"passes none of its interfaces"
                )
            seen[name] = leader
        return "all ranks are on one node" if len(seen) == 1 else None

    def _probe(self) -> str | None:
        """Count a known number of bytes; return what is wrong."""
        exchange = RingExchange(self._group, _PROBE)
        exchange()
        for _ in range(_ATTEMPTS):
            empty = [self.during(lambda: None)[1] for _ in range(_ATTEMPTS)]
            self._idle += np.median(np.stack(empty), axis=0).astype(np.int64)
            ratios = self.during(exchange)[1] / _PROBE
            low, high = float(ratios.min()), float(ratios.max())
            fits = low >= _LEAST and high <= _MOST
            if fits:
                break
        exchange.free()
        if fits:
            return None
        return (
            f"a plain exchange changed the counters by {number_text(low)} to "
            f"{number_text(high)} times its bytes;\nMPI uses another network, or the "
            f"interfaces are busy, or update them late"
        )

    def during(self, operation: Callable[[], T]) -> tuple[T, Array]:
        """Return what an operation returns, and the bytes that it sent. Collective.

        Returns:
            The bytes have a row for each node: out of it, and into it.
        """
        before = self._read()
        result = operation()
        return result, self._read() - before - self._idle

    def _read(self) -> Array:
        comm = self._group.comm
        # Ranks that are done nap here. In a barrier of MPI they would take the cores
        # from those that are not.
        self._group.allgather(None, "counting bytes")
        mine = np.array(self._interfaces.read(), np.int64)
        counts = np.empty((comm.size, 2), np.int64)
        # No rank begins before all have read.
        comm.Allgather(mine, counts)
        return counts[self._leaders]


def describe_links(links: Links) -> str:
    """Return a line or two: where bytes are counted, or why not."""
    if links.obstacle:
        return f"no bytes: {links.obstacle}"
    names = sorted({name for each in links.names for name in each})
    return f"bytes counted by {', '.join(names)} of each of {len(links.names)} nodes"

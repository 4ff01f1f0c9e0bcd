"""The links between nodes: what crosses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpcaccum import Group
from hpcaccum.bench.measure import RingExchange
from hpcaccum.bench.report import number_text
from hpcaccum.dtypes import Array

T = TypeVar("T")

# An exchange of so many bytes between nodes must show in the counters, and not much
# else: bytes over their number. Headers and acknowledgements of TCP take 5 to 10 %.
_PROBE, _LEAST, _MOST = 1 << 20, 0.95, 1.5
_ATTEMPTS = 5

_CLASS_NET = Path("/sys/class/net")
# ARPHRD_LOOPBACK of the kernel.
_LOOPBACK = "772"


class Links:
    """Counts what crosses the links of the nodes during an operation. Collective.

    `obstacle` is why nothing can be counted, or None; `about` tells it to users.
    """

    def __init__(self, group: Group, interfaces: Interfaces | None = None) -> None:
        self._group = group
        self._interfaces = interfaces or Interfaces()
        self._leaders = [ranks[0] for ranks in group.nodes]
        # What the counting itself sends.
        self._idle = np.zeros((len(self._leaders), 2))
        every = group.allgather(self._interfaces.names, "interfaces of the hosts")
        found = {name for rank in self._leaders for name in every[rank]}
        names = ", ".join(sorted(found)) or "no interface"
        self.about = f"bytes counted by {names} of each of {len(self._leaders)} nodes"
        self.obstacle = self._probe()
        if self.obstacle:
            self.about = f"no {self.about}:\n{self.obstacle}"

    def _probe(self) -> str | None:
        """Count a known number of bytes; return what is wrong."""
        exchange = RingExchange(self._group, _PROBE)
        exchange()
        self._idle = self._median(lambda: None)
        ratios = self._median(exchange) / _PROBE
        exchange.free()
        low, high = float(ratios.min()), float(ratios.max())
        if low >= _LEAST and high <= _MOST:
            return None
        return (
            f"a plain exchange changed the counters by {number_text(low)} to "
            f"{number_text(high)} times its bytes;\nMPI uses another network, nodes "
            f"are on one host, or interfaces are busy or late"
        )

    def _median(self, operation: Callable[[], None]) -> Array:
        # Other programs may send in between.
        each = [self.during(operation)[1] for _ in range(_ATTEMPTS)]
        median: Array = np.median(np.stack(each), axis=0)
        return median

    def during(self, operation: Callable[[], T]) -> tuple[T, Array]:
        """Return what an operation returns, and the bytes out of and into each node."""
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


class Interfaces:
    """The interfaces of this host that lead to other hosts, listed by the kernel.

    They are all but loopback, and but those that pass their bytes on to others, such as
    a bridge: bytes would be counted twice.
    """

    def __init__(self, root: Path = _CLASS_NET) -> None:
        self._paths = [
            path.parent
            for path in sorted(root.glob("*/statistics"))
            if not any(path.parent.glob("lower_*"))
            and (path.parent / "type").read_text().strip() != _LOOPBACK
        ]
        self.names = [path.name for path in self._paths]

    def read(self) -> tuple[int, int]:
        """Return the bytes since the host started, of all together: sent, received."""
        sent, received = (
            sum(int((path / "statistics" / name).read_text()) for path in self._paths)
            for name in ("tx_bytes", "rx_bytes")
        )
        return sent, received

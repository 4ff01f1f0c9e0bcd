"""One setting of one strategy, and what its simulation has found."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hpcaccum.plan.compute import Floats, Ints

from hpcaccum.server import LARGE

STRATEGIES = ("cross-shard", "sync-replicas", "drop-stale", "agn", "local-steps")


def automatic_servers(nbytes: int, nodes: int) -> int:
    """Return how many servers ``servers="auto"`` takes for a model."""
    return nodes if nbytes >= LARGE else 1


@dataclass(frozen=True)
class Setting:
    """What is simulated: a strategy, with the options of its optimizer.

    Node i has the i-th block of ranks. The parameters, and a gradient, have ``nbytes``.
    Without a ``quorum``, each gradient makes an update.
    """

    strategy: str
    ranks: int
    nodes: int
    nbytes: int
    quorum: int | None = None
    staleness: float = math.inf
    period: int = 1
    fragments: int = 1
    servers: int = 1

    @property
    def node_of(self) -> Ints:
        """The node of each rank."""
        return np.arange(self.ranks) * self.nodes // self.ranks

    @property
    def pushed(self) -> float:
        """Bytes of one push."""
        return self.nbytes / self.fragments

    @property
    def steps(self) -> int:
        """Gradients that a rank computes between two pushes."""
        return max(1, self.period // self.fragments)

    @property
    def name(self) -> str:
        """The strategy and its options, in words."""
        each = self.quorum is None
        options = {
            f"quorum {self.quorum}": not each,
            f"period {self.period}": self.strategy in ("agn", "local-steps"),
            f"fragments {self.fragments}": self.fragments > 1,
            f"staleness {self.staleness:g}": each and math.isfinite(self.staleness),
            "lateness": not each and self.staleness > 0,
            f"servers {self.servers}": self.servers > 1,
        }
        return " ".join([self.strategy, *(text for text in options if options[text])])

    @property
    def synchronous(self) -> bool:
        """Whether an update waits for several gradients."""
        return self.quorum is not None or not self.has_server

    @property
    def has_server(self) -> bool:
        """Whether updates are made by a parameter server."""
        return self.strategy != "cross-shard"

    @property
    def memory_bytes(self) -> int:
        """Of the fullest node: variables, gradients, and what servers need."""
        here = -(-self.ranks // self.nodes)
        # Each rank has its variables, its gradient, and its buffers for the exchange,
        # and knows where its local steps began.
        copies = 4 if self.quorum and self.has_server else 3
        nbytes = here * self.nbytes * (copies + (self.strategy == "local-steps"))
        if self.has_server:
            # Two copies that a node reads, and a part of the center.
            nbytes += 2 * self.nbytes + -(-self.nbytes // self.servers)
        return nbytes


@dataclass
class Outcome:
    """What a simulation finds, of as many updates.

    Seconds that each rank has computed, that the server has made updates, and that the
    busiest link has carried data in one direction; how many gradients arrived with each
    lag, and did not count; the mean lag by Little's law.
    """

    updates: int
    computing: Floats
    lags: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    server: float = 0.0
    link: float = 0.0
    seconds: float = 0.0
    law: float = 0.0

    @property
    def waiting(self) -> Floats:
        """The share of time in which each rank did not compute."""
        found: Floats = np.clip(1 - self.computing / self.seconds, 0, 1)
        return found

    def figures(self, samples: float, trains: float) -> dict[str, float]:
        """Return what is shown and written.

        A push has so many ``samples``, and ranks train for a part of the time.
        """
        arrived = self.lags.total()
        accepted = arrived - self.dropped
        return {
            "updates_per_second": self.updates / self.seconds * trains,
            "samples_per_second": accepted * samples / self.seconds * trains,
            "dropped": self.dropped / arrived,
            "mean_lag": sum(lag * n for lag, n in self.lags.items()) / arrived,
            "waiting": float(self.waiting.mean()),
            "busiest_link": self.link / self.seconds,
            "server_utilisation": self.server / self.seconds,
            "law": self.law,
        }

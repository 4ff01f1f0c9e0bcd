"""What is simulated: a setting of a strategy, on a machine; and what is found.

The costs of an exchange on a machine are fitted by ``bench plan``, or two numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcaccum.deadline import EAGER, nap_after
from hpcaccum.option_values import levels, numbers_of
from hpcaccum.server import LARGE, SHARE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STRATEGIES = ("cross-shard", "sync-replicas", "drop-stale", "agn", "local-steps")
# How often a local step moves the parameters: an update; and for AGN, a sum.
_LOCAL_STEP = {"agn": 5, "local-steps": 3}
NETWORK = (
    "a file that hpcaccum bench plan --json wrote, or a latency and a rate of a "
    "node, and optionally between nodes, such as '1us 25GB/s; 2us 12GB/s'"
)
# The product's own rule, at so many seconds that it is the same between them.
_WAITS = np.concatenate([[0.0], np.geomspace(EAGER, 1.0, 500)])
_NAPS = np.array([0.0, *map(nap_after, _WAITS[1:].tolist())])


@dataclass(frozen=True)
class Setting:
    """What is simulated: a strategy, with the options of its optimizer.

    Node i has the i-th block of ranks. The parameters have ``nbytes``, of which a
    gradient of ``batch`` samples has the rows that it has ``touched``. Without a
    ``quorum``, each makes an update. Of the ranks, some are ``lost``.
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
    batch: int = 1
    touched: float = 1.0
    lost: tuple[int, ...] = ()

    @staticmethod
    def automatic_servers(nbytes: int, nodes: int) -> int:
        """Return how many servers ``servers="auto"`` takes for a model."""
        return nodes if nbytes >= LARGE else 1

    @property
    def present(self) -> Ints:
        """The ranks that train."""
        return np.delete(np.arange(self.ranks), self.lost)

    @property
    def node_of(self) -> Ints:
        """The node of each rank that trains."""
        return self.present * self.nodes // self.ranks

    def bytes_of(self, pushes: int) -> float:
        """Return the bytes of the rows that so many pushes have, each random ones."""
        missed = (1 - self.touched) ** (pushes * self.period)
        return self.nbytes * (1 - missed) / self.fragments

    def changed(self, updates: int) -> float:
        """Return the bytes that a node lacks after updates of one push each."""
        few = updates * self.period * self.touched <= 1 / SHARE
        return self.bytes_of(updates) if few else self.nbytes / self.fragments

    @property
    def pushed(self) -> float:
        """Bytes of one push."""
        return self.bytes_of(1)

    @property
    def copied(self) -> float:
        """Bytes of a push, or as many as can be copied in the time of its rows."""
        return self.pushed * (1 if self.touched == 1 else SHARE)

    @property
    def exchanged(self) -> float:
        """Bytes that cross the link of a node in an allreduce, in each direction."""
        others = (self.nodes - 1) / self.nodes
        if self.touched == 1:
            return 2 * others * self.nbytes
        # Each rank gets the rows of all others.
        return others * self.ranks * self.pushed

    @property
    def gaps(self) -> Ints:
        """Gradients that a rank computes for each push of a period."""
        ends = np.arange(self.fragments + 1) * self.period // self.fragments
        return np.diff(ends)

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
        gradient = round(self.nbytes * self.touched)
        if not self.has_server:
            # Each rank has its variables and its gradient, and the node the mean.
            return here * self.nbytes + (here + 1) * gradient
        # Each rank also has its buffers for the exchange; the node, two copies that its
        # ranks read, and a part of the center.
        nbytes = (here + 2) * self.nbytes + here * gradient * (3 if self.quorum else 2)
        return nbytes + -(-self.nbytes // self.servers)


@dataclass(frozen=True)
class Machine:
    """The costs, in seconds and in bytes a second.

    Attributes:
        call: Of a rank for one gradient, beside what follows; and once more from an
            update until it pulls. The mean of an exponential distribution.
        turn: Of one gradient, which the ranks of a node spend one after the other.
        work: Of a core for one gradient, if ranks share ``cores`` of a node.
        update: Of an update on the server, right after another one.
        reduce: Of an allreduce on one node, and of a message of one between nodes.
        copy: Rate at which the ranks of a node copy, all together.
        latency: Of a message of an agent to another node.
        link: Rate of the link of a node, in each direction.
        cores: Of a node; 0 if it is not known.
        ranks, nodes, nbytes: The most ranks on a node, nodes, and bytes of a gradient,
            for which it was measured; 0 if it was not, or is not known.
    """

    call: float = 500e-6
    turn: float = 20e-6
    work: float = 0.0
    update: float = 50e-6
    reduce: float = 50e-6
    copy: float = 20e9
    latency: float = 50e-6
    link: float = 10e9
    cores: int = 0
    ranks: int = 0
    nodes: int = 0
    nbytes: int = 0

    def moved(self, setting: Setting, steps: Any = 0) -> Any:
        """Return seconds in which a rank copies its push or pull, and makes steps."""
        moves = steps * _LOCAL_STEP.get(setting.strategy, 0) * setting.touched
        return (setting.copied + moves * setting.nbytes) / self.copy

    def turns(self, setting: Setting, nodes: int = 1) -> float:
        """Return seconds of a gradient that the ranks of some nodes spend in turns."""
        shares = 1 / self.cores - setting.nodes / setting.ranks if self.cores else 0.0
        return max(self.turn, self.work * shares / nodes)

    def crossing(self, setting: Setting) -> float:
        """Return seconds in which a push crosses the link of a server."""
        return setting.pushed / setting.servers / self.link

    def updating(self, setting: Setting, gradients: int) -> float:
        """Return seconds of an update of so many gradients of the server's node."""
        moves = gradients + 2
        return self.update + moves * setting.copied / setting.servers / self.copy

    def reducing(self, setting: Setting) -> float:
        """Return seconds of an allreduce, from the arrival of the last rank."""
        here, nodes = -(-setting.ranks // setting.nodes), setting.nodes
        copied = setting.nbytes
        if setting.touched < 1:
            # Every rank adds the rows of all.
            copied = round(setting.ranks * setting.pushed)
        took = self.reduce + here * self.turns(setting) + 3 * here * copied / self.copy
        if nodes > 1:
            took += 2 * np.log2(nodes) * self.reduce + setting.exchanged / self.link
        return float(took)


def napped(waited: Floats, uniform: Floats) -> Floats:
    """Return how late ranks notice what they have waited for, by the naps they take."""
    return np.interp(waited, _WAITS, _NAPS) * uniform  # type: ignore[no-any-return]


def machine(text: str) -> Machine:
    """Return what ``--network`` says, or raise ArgumentTypeError."""
    if (path := Path(text)).is_file():
        # A rate divides.
        least = {name: float(name in ("copy", "link")) for name in vars(Machine())}
        usual = dict.fromkeys(("work", "cores", "ranks", "nodes", "nbytes"), 0)
        costs = numbers_of(path, "machine", least, **usual)
        return Machine(**costs)
    (call, copy), *network = levels(text, f"must be {NETWORK}")
    found = Machine(call=Machine.call + call, copy=copy, nodes=1)
    for latency, link in network:
        found = replace(found, reduce=latency, latency=latency, link=link, nodes=0)
    return found

"""What an exchange costs on a machine: fitted by ``bench plan``, or by two numbers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import EAGER, nap_after
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.files import json_value, read_lines
from hpcaccum.option_values import quantity
from hpcaccum.plan.compute import seconds

if TYPE_CHECKING:
    from hpcaccum.plan.compute import Floats
    from hpcaccum.plan.setting import Setting

_RATES = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
NETWORK = (
    "a file that hpcaccum bench plan --json wrote, or a latency and a rate of a "
    "node, and optionally between nodes, such as '1us 25GB/s; 2us 12GB/s'"
)
# The product's own rule, at so many seconds that it is the same between them.
_WAITS = np.concatenate([[0.0], np.geomspace(EAGER, 1.0, 500)])
_NAPS = np.array([0.0, *map(nap_after, _WAITS[1:].tolist())])


@dataclass(frozen=True)
class Machine:
    """The costs, in seconds and in bytes a second.

    Attributes:
        call: Of a rank for one gradient, beside what follows: the mean of times that
            are distributed exponentially, as those of ranks that share cores are.
        turn: Of one gradient, which the ranks of a node spend one after the other, as
            they share words in memory, or cores.
        update: Of an update on the server, right after another one.
        answer: From an update until a rank that has waited for it pulls, as `call`.
        reduce: Of an allreduce on one node.
        copy: Rate at which the ranks of a node copy, all together.
        latency: Of a message to another node.
        link: Rate of the link of a node, in each direction.
        ranks: The largest number of ranks on a node for which it was measured; 0 if it
            was not.
    """

    call: float = 1e-3
    turn: float = 20e-6
    update: float = 50e-6
    answer: float = 150e-6
    reduce: float = 100e-6
    copy: float = 20e9
    latency: float = 50e-6
    link: float = 10e9
    ranks: int = 0

    def moved(self, setting: Setting) -> float:
        """Return seconds in which a rank copies its gradient or its parameters."""
        return setting.pushed / self.copy

    def crossing(self, setting: Setting) -> float:
        """Return seconds in which one gradient crosses the link of a server."""
        return setting.pushed / setting.servers / self.link

    def updating(self, setting: Setting, gradients: int) -> float:
        """Return seconds of an update of so many gradients of the server's node."""
        moves = gradients + 2
        return self.update + moves * setting.pushed / setting.servers / self.copy

    def reducing(self, setting: Setting) -> float:
        """Return seconds of an allreduce, from the arrival of the last rank."""
        here, nodes = -(-setting.ranks // setting.nodes), setting.nodes
        took = self.reduce + here * self.turn + 3 * here * setting.nbytes / self.copy
        if nodes > 1:
            took += 2 * np.log2(nodes) * self.latency
            took += 2 * (nodes - 1) / nodes * setting.nbytes / self.link
        return float(took)


def napped(waited: Floats, uniform: Floats) -> Floats:
    """Return how late ranks notice what they have waited for, by the naps they take."""
    found: Floats = np.interp(waited, _WAITS, _NAPS) * uniform
    return found


def machine(text: str) -> Machine:
    """Return what ``--network`` says, or raise ArgumentTypeError."""
    if Path(text).is_file():
        return _fitted(Path(text))
    levels = [each.strip().partition(" ") for each in text.split(";")]
    if len(levels) > 2:
        raise argparse.ArgumentTypeError(
            f"must have two levels at most, of a node and between nodes, got {text!r}"
        )
    wanted = f"must be {NETWORK}"
    rates = [quantity(rate.strip(), _RATES, wanted) for _, _, rate in levels]
    latencies = [seconds(latency, "a latency") for latency, _, _ in levels]
    costs: dict[str, Any] = {"call": Machine.call + latencies[0], "copy": rates[0]}
    if len(levels) == 2:
        costs.update(latency=latencies[1], link=rates[1])
    return Machine(**costs)


def _fitted(path: Path) -> Machine:
    try:
        facts = json_value("\n".join(read_lines(path)).partition("\n")[0])["machine"]
        return Machine(**facts)
    except (InvalidArgumentError, ValueError, TypeError, LookupError):
        raise argparse.ArgumentTypeError(
            f"{path} is not what hpcaccum bench plan --json writes"
        ) from None

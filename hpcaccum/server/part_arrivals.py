"""The agent of a node whose ranks wait: it asks for steps, and receives their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.nodes import Incoming, one_range, pieces_of
from hpcaccum.server.order_words import PARAMETERS
from hpcaccum.spans import steps, traced

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.nodes import Steps
    from hpcaccum.server.agent_line import AgentLine
    from hpcaccum.server.node_copy import NodeCopy
    from hpcaccum.server.server_orders import ServerOrders
    from hpcaccum.server.shard import Shard


class PartArrivals:
    """Receives the parts of steps, one step after the other; used by an `OrderAgent`.

    Args:
        line: To the other agents.
        nodes: Of the servers; the first is the root's.
        shards: Of the servers.
        server: The orders of this node's server, if it has one.
        node_copy: Where ranks of this node read the parameters.
    """

    def __init__(
        self,
        line: AgentLine,
        nodes: Sequence[int],
        shards: Sequence[Shard],
        server: ServerOrders | None,
        node_copy: NodeCopy,
    ) -> None:
        self._line, self._nodes, self._shards = line, nodes, shards
        self._server, self._node_copy = server, node_copy
        self._copies = node_copy.copies
        # The steps for which ranks wait, the one that was asked for, and those on their
        # way.
        self._waiting: set[int] = set()
        self._wanted: int | None = None
        self._coming = line.queue()

    def fetch(self, step: int) -> None:
        """Ask for a step for this node, once."""
        if self._copies.version() < step:
            self._waiting.add(step)
            self._want()

    def _want(self) -> None:
        least = min(self._waiting, default=None)
        if least is not None and (self._wanted is None or least < self._wanted):
            self._wanted = least
            self._line.tell(self._nodes[:1], "want", self._line.node, least)

    def come(self, step: int) -> None:
        """Receive the parts of a step, after those of earlier ones."""
        self._coming.add(self._fetch(step))

    def _fetch(self, step: int) -> Steps:
        yield from self._receive(step, self._copies.begin(step))
        self._node_copy.complete(step)
        self._waiting = {each for each in self._waiting if each > step}
        self._wanted = None
        self._want()

    @traced("receive", lambda args, _: {"step": args[1]}, steps)
    def _receive(self, step: int, vector: Array) -> Steps:
        """Receive all parts into a vector."""
        receiving = [
            self._incoming(node, shard.part, vector)
            for node, shard in zip(self._nodes, self._shards, strict=True)
            if node != self._line.node
        ]
        while self._server is not None and not self._server.take_own(step, vector):
            yield from _take_all(receiving)
            yield False
        while any(not each.complete for each in receiving):
            yield from _take_all(receiving)
            yield False

    def _incoming(self, node: int, part: slice, vector: Array) -> Incoming:
        rank, tag = self._line.leaders[node], self._line.tag(PARAMETERS)
        pieces = pieces_of([part], self._copies.dtype.itemsize)
        return Incoming(self._line.comm, rank, tag, pieces, one_range(vector))


def _take_all(receiving: Iterable[Incoming]) -> Steps:
    """Take the pieces that have arrived."""
    for each in receiving:
        while not each.complete and each.first() is not None:
            each.take()
            yield True

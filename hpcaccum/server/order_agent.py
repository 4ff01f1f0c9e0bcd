"""The agents of a center in parts: they carry orders, gradients and parameters.

The root decides which gradients make each update, and its agent sends an order to the
agents of all nodes concerned (`root_orders`). The agent of a node adds the gradients of
its ranks and sends each server its part of the sum. The agent of a server adds these
sums, and the server updates its part (`server_orders`). An order also lists the nodes
that wait for the new parameters, and every server sends them its part
(`part_arrivals`). Servers carry out orders one after the other, so all parts that a
node gets are of one step.

A step is a version here (`NodeCopy`): a server makes another one of the same step when
values are assigned.

The root may order a few steps before the first of them is made. Their gradients then
travel at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.server.agent_line import AgentLine
from hpcaccum.server.order_words import GRADIENTS
from hpcaccum.server.part_arrivals import PartArrivals
from hpcaccum.server.root_orders import RootOrders
from hpcaccum.server.server_orders import ServerOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.mpi import AtomicWords
    from hpcaccum.nodes import Agent, NodeParts, Place, Steps
    from hpcaccum.server.node_copy import NodeCopy
    from hpcaccum.server.shard import Server, Shard


class OrderAgent:
    """The service of one node's agent.

    Args:
        agent: Runs it.
        nodes: Of the servers; the first is the root's.
        shards: Of the servers.
        server: That of this node, if it has one.
        parts: Where gradients lie.
        node_copy: Where ranks of this node read the parameters.
        words: Of this node.
        steps: Of the root.
    """

    def __init__(
        self,
        agent: Agent,
        nodes: Sequence[int],
        shards: Sequence[Shard],
        server: Server | None,
        parts: NodeParts,
        node_copy: NodeCopy,
        words: AtomicWords,
        steps: AtomicWords,
    ) -> None:
        self._shards = dict(zip(nodes, shards, strict=True))
        self._parts, self._dtype = parts, node_copy.copies.dtype
        line = self._line = AgentLine(agent)

        def write(word: int, value: int) -> None:
            """Set a word that a rank of this node waits for."""
            words.write(word, value)
            node_copy.changed.announce()

        orders = RootOrders(line, nodes, parts, write, steps)
        self._server: ServerOrders | None = None
        if server is not None:
            self._server = ServerOrders(line, nodes[0], server, parts, words, write)
        self._arrivals = PartArrivals(line, nodes, shards, self._server, node_copy)
        # To each node, so that gradients of two steps do not mix.
        self._giving = line.queues()
        # What an agent does at a request. Those of the root come to its node only.
        self._do: dict[str, Callable[..., None]] = {
            "begin": orders.begin,
            "order": orders.order,
            "want": orders.want,
            "made": orders.made,
            "ask": orders.ask,
            "end": orders.end,
            "step": self._step,
            "fetch": self._arrivals.fetch,
            "coming": self._arrivals.come,
        }
        if self._server is not None:
            self._do |= {"send": self._server.send, "obey": self._server.obey}
        self.number = line.number = agent.add(self)

    def tag(self, channel: int) -> int:
        """Return the tag of a channel."""
        return self._line.tag(channel)

    def handle(self, source: int, kind: str, *request: Any) -> Steps:
        """Begin to carry out a request."""
        self._do[kind](*request)
        return iter(())

    def _step(
        self,
        step: int,
        places: list[Place],
        divisor: int,
        rate: float | None,
        ready: list[int],
    ) -> None:
        """Give gradients, make the step, receive its parameters."""
        self._give(self._parts.by_node(places).get(self._line.node, []))
        if self._server is not None:
            self._server.make(step, places, divisor, rate, ready)
        if self._line.node in ready:
            self._arrivals.come(step)

    def _give(self, places: list[Place]) -> None:
        """Send each server its part of the sum of this node, if it has gradients."""
        for node in self._line.in_turn(self._shards):
            if places and node != self._line.node:
                rank, tag = self._line.leaders[node], self.tag(GRADIENTS)
                steps = self._parts.sending(
                    rank, tag, places, self._dtype, self._shards[node].ranges
                )
                self._giving[node].add(steps)

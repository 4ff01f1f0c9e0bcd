"""The agent of a server: it collects gradients, and sends the new part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.nodes import one_range, pieces_of, send_pieces
from hpcaccum.server.node_copy import step_of, version_of
from hpcaccum.server.order_words import (
    ASSIGN,
    DONE,
    GRADIENTS,
    KIND,
    NO_UPDATE,
    ORDER,
    PARAMETERS,
    UPDATE,
    bits,
)
from hpcaccum.spans import steps, traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import AtomicWords
    from hpcaccum.nodes import NodeParts, Place, Steps
    from hpcaccum.server.agent_line import AgentLine
    from hpcaccum.server.shard import Server


@dataclass
class _Snapshot:
    """A copy of a part, which agents send while the server goes on."""

    vector: Array
    users: int = 0


class ServerOrders:
    """Has a server carry out orders, one after the other.

    So all parts that a node gets are of one step.

    Args:
        line: To the other agents.
        root: The node of the root.
        server: The server of this node.
        parts: Where gradients lie.
        words: Of this node.
        write: Sets one of them, and announces it.
    """

    def __init__(
        self,
        line: AgentLine,
        root: int,
        server: Server,
        parts: NodeParts,
        words: AtomicWords,
        write: Callable[[int, int], None],
    ) -> None:
        self._line, self._root, self._server = line, root, server
        self._parts, self._words, self._write = parts, words, write
        # The orders, the number of the last one that the server has got, and the steps
        # whose gradients it has.
        self._orders, self._given = line.queue(), 0
        self._collected: set[int] = set()
        # From and to each node, so that pieces of two steps do not mix: gradients and
        # parameters.
        self._collecting, self._sending = line.queues(), line.queues()
        # Of parameters; by step, those for this node.
        self._snapshots: list[_Snapshot] = []
        self._own: dict[int, _Snapshot] = {}

    def make(
        self,
        step: int,
        places: list[Place],
        divisor: int,
        rate: float | None,
        ready: list[int],
    ) -> None:
        """Collect gradients, have the server make a step of them, send it to nodes."""
        if places:
            # If there are several nodes, no other step has been ordered.
            first = next(iter(self._parts.by_node(places)))
            self._collecting[first].add(self._collect(step, places, divisor))
        self._orders.add(self._make(step, places, rate, ready))

    def send(self, step: int, nodes: list[int]) -> None:
        """Send a step to nodes that have asked for it, after all earlier orders."""
        self._orders.add(self._send(step, nodes))

    def obey(self, kind: int, detail: int = 0) -> None:
        """Give the server an order of another kind, after all earlier ones."""
        self._orders.add(self._obey(kind, detail))

    def take_own(self, step: int, vector: Array) -> bool:
        """Copy the part of a step to its place, once; return whether it was made."""
        snapshot = self._own.pop(step, None)
        if snapshot is None:
            return False
        np.copyto(vector[self._server.shard.part], snapshot.vector)
        snapshot.users -= 1
        return True

    def _collect(self, step: int, places: list[Place], divisor: int) -> Steps:
        """Receive the gradients of a step."""
        yield from self._parts.collecting(
            self._line.tag(GRADIENTS),
            places,
            self._server.shard.ranges,
            divisor,
            self._server.gradients[self._buffer(step)],
        )
        self._collected.add(step)

    def _buffer(self, version: int) -> int:
        return step_of(version) % len(self._server.gradients)

    def _make(
        self, step: int, places: list[Place], rate: float | None, nodes: list[int]
    ) -> Steps:
        """Have the server update its part; send it to nodes."""
        while places and step not in self._collected:
            yield False
        self._collected.discard(step)
        kind = UPDATE if places else NO_UPDATE
        if step != version_of(step_of(step)):
            kind = ASSIGN
        yield from self._obey(kind, bits(rate), self._buffer(step))
        yield from self._send(step, nodes)
        self._line.tell([self._root], "made", self._server.number, step)

    def _obey(self, kind: int, detail: int, buffer: int = 0) -> Steps:
        """Give the server of this node an order; wait until it is carried out."""
        self._given += 1
        self._words.store(KIND, [kind, detail, buffer])
        self._write(ORDER, self._given)
        done = self._words.watch(DONE)
        while done() < self._given:
            yield False
        # What the server has changed can be read from now on.
        self._words.sync()

    def _send(self, step: int, nodes: list[int]) -> Steps:
        """Begin to send this server's part to nodes."""
        if not nodes:
            return
        yield True
        snapshot = self._snapshot()
        for node in self._line.in_turn(nodes):
            snapshot.users += 1
            if node == self._line.node:
                self._own[step] = snapshot
            else:
                self._sending[node].add(self._send_to(node, snapshot))

    def _snapshot(self) -> _Snapshot:
        """Return a copy of the part; a node that is slow must not delay updates."""
        part = self._server.part
        snapshot = next((each for each in self._snapshots if not each.users), None)
        if snapshot is None:
            snapshot = _Snapshot(np.empty_like(part))
            self._snapshots.append(snapshot)
        np.copyto(snapshot.vector, part)
        return snapshot

    @traced("send", lambda args, _: {"to": args[0]._line.leaders[args[1]]}, steps)
    def _send_to(self, node: int, snapshot: _Snapshot) -> Steps:
        vector, rank = snapshot.vector, self._line.leaders[node]
        pieces = pieces_of([slice(0, len(vector))], vector.itemsize)
        comm, tag = self._line.comm, self._line.tag(PARAMETERS)
        yield from send_pieces(comm, rank, tag, pieces, one_range(vector))
        snapshot.users -= 1

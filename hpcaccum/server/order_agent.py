"""The agents of a center in parts: they carry orders, gradients and parameters.

The host decides which gradients make each update, and its agent sends an order to the
agents of all nodes concerned. The agent of a node adds the gradients of its ranks and
sends each server its part of the sum. The agent of a server adds these sums, and the
server updates its part. An order also lists the nodes that wait for the new parameters,
and every server sends them its part. Servers carry out orders one after the other, so
all parts that a node gets are of one step.

The host may order a few steps before the first of them is made. Their gradients then
travel at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.nodes import Incoming, one_range, pieces_of, send_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpcaccum.mpi import AtomicWords
    from hpcaccum.nodes import Agent, NodeParts, Place, Steps
    from hpcaccum.server.node_copy import NodeCopy
    from hpcaccum.server.shard import Shard

Array = np.ndarray[Any, Any]

# Words of a node. Of a server: the number of its newest order, of the last that it has
# carried out, what it asks for, a number that belongs to that, and which gradients.
# Then, on the host's node, the last step of each server.
ORDER, DONE, KIND, DETAIL, BUFFER, MADE = range(6)
# Words of the host: the newest step that was ordered; again the last of each server,
# for messages of all ranks.
NEWEST = 0
# What an order asks a server for: an update, with a learning rate as bits; an answer,
# with the number of the question.
UPDATE, NO_UPDATE, ANSWER, END = range(4)
# Channels of messages: gradients, parameters, questions to servers, answers.
GRADIENTS, PARAMETERS, QUESTIONS, ANSWERS = range(4)


@dataclass
class Server:
    """The server of a node, in memory of the node.

    Attributes:
        number: Its place among the servers.
        shard: Its part of the center.
        part: The parameters of this part.
        gradients: Those of its next updates, shape (buffers, elements). Those of a step
            have the place of its number modulo ``buffers``.
    """

    number: int
    shard: Shard
    part: Array
    gradients: Array


@dataclass
class _Snapshot:
    """A copy of a part, which agents send while the server goes on."""

    vector: Array
    users: int = 0


class _Queue:
    """Steps of an agent that it runs one after the other.

    Args:
        run: Makes the agent run steps.
    """

    def __init__(self, run: Callable[[Steps], None]) -> None:
        self._run, self._running = run, False
        self._waiting: deque[Steps] = deque()

    def add(self, steps: Steps) -> None:
        """Run steps after those that were added before."""
        self._waiting.append(steps)
        if not self._running:
            self._running = True
            self._run(self._run_all())

    def _run_all(self) -> Steps:
        while self._waiting:
            yield from self._waiting.popleft()
        self._running = False


class OrderAgent:
    """The service of one node's agent.

    Args:
        agent: Runs it.
        nodes: Of the servers; the first is the host's.
        shards: Of the servers.
        server: That of this node, if it has one.
        parts: Where gradients lie.
        node_copy: Where ranks of this node read the parameters.
        words: Of this node.
        steps: Of the host.
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
        self._agent, self._nodes, self._shards = agent, nodes, shards
        self._server, self._parts = server, parts
        self._node_copy, self._copies = node_copy, node_copy.copies
        self._words, self._steps = words, steps
        # Of a server: its orders, the number of the last one that it has got, the steps
        # whose gradients it has, and snapshots.
        self._orders, self._given = self._queue(), 0
        self._collected: set[int] = set()
        self._snapshots: list[_Snapshot] = []
        # To and from each node, so that pieces of two steps do not mix: gradients to
        # it, gradients from it, and parameters to it.
        nodes_of_agents = range(len(agent.leaders))
        self._giving = {node: self._queue() for node in nodes_of_agents}
        self._collecting = {node: self._queue() for node in nodes_of_agents}
        self._sending = {node: self._queue() for node in nodes_of_agents}
        # Of the host: the step that was ordered last, and whether servers were told to
        # end; the least step that each node waits for, and the last step sent to each.
        self._ordered, self._ended = -1, False
        self._wants: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        # Of every node: the steps for which its ranks wait, the one that it has asked
        # for, steps on their way, and the part of its own server of each of these.
        self._waiting: set[int] = set()
        self._wanted: int | None = None
        self._coming = self._queue()
        self._own: dict[int, _Snapshot] = {}
        self.number = agent.add(self)

    def _queue(self) -> _Queue:
        return _Queue(lambda steps: self._agent.run(self.number, steps))

    def tag(self, channel: int) -> int:
        """Return the tag of a channel."""
        return self._agent.tag(self.number, channel)

    def _write(self, word: int, value: int) -> None:
        """Set a word that a rank of this node waits for."""
        self._words.write(word, value)
        self._node_copy.changed.announce()

    def handle(self, source: int, kind: str, *request: Any) -> Steps:
        """Begin to carry out a request."""
        getattr(self, f"_do_{kind}")(*request)
        return iter(())

    def _tell(self, nodes: Iterable[int], *request: Any) -> None:
        for node in nodes:
            self._agent.request(node, self.number, *request)

    # The host's agent

    def _do_begin(self, step: int) -> None:
        self._ordered = step
        # Of agents whose messages came before this one.
        for node, wanted in list(self._wants.items()):
            self._do_want(node, wanted)

    def _do_order(
        self,
        step: int,
        places: list[Place],
        divisor: int,
        rate: float | None,
        awaited: bool,
    ) -> None:
        """Send the order for a step to all nodes concerned, once."""
        if step <= self._ordered:
            return
        self._ordered = step
        givers = set(self._parts.by_node(places))
        ready = {node for node, wanted in self._wants.items() if wanted <= step}
        if awaited:
            # They need not ask.
            ready |= givers
        for node in ready:
            self._wants.pop(node, None)
            self._sent[node] = step
        order = step, places, divisor, rate, sorted(ready)
        self._tell(givers.union(ready, self._nodes), "step", *order)

    def _do_want(self, node: int, step: int) -> None:
        """Have a step sent to a node, now or when it is ordered."""
        if step <= self._sent.get(node, -1):
            return
        if step <= self._ordered:
            # If it waits for a later one, too, it asks again.
            self._wants.pop(node, None)
            self._sent[node] = self._ordered
            self._tell(self._nodes, "send", self._ordered, [node])
            self._tell([node], "coming", self._ordered)
        else:
            self._wants[node] = min(step, self._wants.get(node, step))

    def _do_made(self, server: int, step: int) -> None:
        self._steps.write(NEWEST + 1 + server, step)
        self._write(MADE + server, step)

    def _do_ask(self, question: int) -> None:
        self._tell(self._nodes, "obey", ANSWER, question)

    def _do_end(self) -> None:
        """End the loops of all servers, once."""
        if not self._ended:
            self._ended = True
            self._tell(self._nodes, "obey", END)

    # An order, on every node that it concerns

    def _do_step(
        self,
        step: int,
        places: list[Place],
        divisor: int,
        rate: float | None,
        ready: list[int],
    ) -> None:
        """Give gradients, make the step, receive its parameters."""
        nodes = self._parts.by_node(places)
        self._give(nodes.get(self._agent.node, []))
        if self._server is not None:
            if nodes:
                # If there are several nodes, no other step has been ordered.
                collect = self._collect(step, places, divisor)
                self._collecting[next(iter(nodes))].add(collect)
            self._orders.add(self._make(step, places, rate, ready))
        if self._agent.node in ready:
            self._do_coming(step)

    def _give(self, places: list[Place]) -> None:
        """Send each server its part of the sum of this node, if it has gradients."""
        shards = dict(zip(self._nodes, self._shards, strict=True))
        for node in self._in_turn(shards):
            if places and node != self._agent.node:
                rank, tag = self._agent.leaders[node], self.tag(GRADIENTS)
                steps = self._parts.sending(
                    rank, tag, places, self._copies.dtype, shards[node].ranges
                )
                self._giving[node].add(steps)

    def _in_turn(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes in an order that begins after this one.

        All nodes send at a time. If all began with the same node, its link would delay
        them while others are idle.
        """
        count = len(self._agent.leaders)
        return sorted(nodes, key=lambda node: (node - self._agent.node - 1) % count)

    # The agent of a server

    def _do_send(self, step: int, nodes: list[int]) -> None:
        self._orders.add(self._send(step, nodes))

    def _do_obey(self, kind: int, detail: int = 0) -> None:
        self._orders.add(self._obey(kind, detail))

    def _collect(self, step: int, places: list[Place], divisor: int) -> Steps:
        """Receive the gradients of a step."""
        server = self._server
        assert server is not None
        yield from self._parts.collecting(
            self.tag(GRADIENTS),
            places,
            server.shard.ranges,
            divisor,
            server.gradients[self._buffer(step)],
        )
        self._collected.add(step)

    def _buffer(self, step: int) -> int:
        assert self._server is not None
        return step % len(self._server.gradients)

    def _make(
        self, step: int, places: list[Place], rate: float | None, nodes: list[int]
    ) -> Steps:
        """Have the server update its part; send it to nodes."""
        assert self._server is not None
        while places and step not in self._collected:
            yield False
        self._collected.discard(step)
        kind = UPDATE if places else NO_UPDATE
        yield from self._obey(kind, bits(rate), self._buffer(step))
        yield from self._send(step, nodes)
        self._tell(self._nodes[:1], "made", self._server.number, step)

    def _obey(self, kind: int, detail: int, buffer: int = 0) -> Steps:
        """Give the server of this node an order; wait until it is carried out."""
        self._given += 1
        self._words.write_range(KIND, [kind, detail, buffer])
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
        for node in self._in_turn(nodes):
            snapshot.users += 1
            if node == self._agent.node:
                self._own[step] = snapshot
            else:
                self._sending[node].add(self._send_to(node, snapshot))

    def _snapshot(self) -> _Snapshot:
        """Return a copy of the part; a node that is slow must not delay updates."""
        assert self._server is not None
        part = self._server.part
        snapshot = next((each for each in self._snapshots if not each.users), None)
        if snapshot is None:
            snapshot = _Snapshot(np.empty_like(part))
            self._snapshots.append(snapshot)
        np.copyto(snapshot.vector, part)
        return snapshot

    def _send_to(self, node: int, snapshot: _Snapshot) -> Steps:
        vector, rank = snapshot.vector, self._agent.leaders[node]
        pieces = pieces_of([slice(0, len(vector))], vector.itemsize)
        comm, tag = self._agent.comm, self.tag(PARAMETERS)
        yield from send_pieces(comm, rank, tag, pieces, one_range(vector))
        snapshot.users -= 1

    # The agent of a node that waits

    def _do_fetch(self, step: int) -> None:
        """Ask for a step for this node, once."""
        if self._copies.version() < step:
            self._waiting.add(step)
            self._want()

    def _want(self) -> None:
        least = min(self._waiting, default=None)
        if least is not None and (self._wanted is None or least < self._wanted):
            self._wanted = least
            self._tell(self._nodes[:1], "want", self._agent.node, least)

    def _do_coming(self, step: int) -> None:
        """Receive the parts of a step, after those of earlier ones."""
        self._coming.add(self._fetch(step))

    def _fetch(self, step: int) -> Steps:
        yield from self._receive(step, self._copies.begin(step))
        self._node_copy.complete(step)
        self._waiting = {each for each in self._waiting if each > step}
        self._wanted = None
        self._want()

    def _receive(self, step: int, vector: Array) -> Steps:
        """Receive all parts into a vector."""
        receiving = [
            self._incoming(node, shard.part, vector)
            for node, shard in zip(self._nodes, self._shards, strict=True)
            if node != self._agent.node
        ]
        if self._server is not None:
            while step not in self._own:
                yield from _take_all(receiving)
                yield False
            snapshot = self._own.pop(step)
            np.copyto(vector[self._server.shard.part], snapshot.vector)
            snapshot.users -= 1
        while any(not each.complete for each in receiving):
            yield from _take_all(receiving)
            yield False

    def _incoming(self, node: int, part: slice, vector: Array) -> Incoming:
        rank, tag = self._agent.leaders[node], self.tag(PARAMETERS)
        pieces = pieces_of([part], self._copies.dtype.itemsize)
        return Incoming(self._agent.comm, rank, tag, pieces, one_range(vector))


def _take_all(receiving: Iterable[Incoming]) -> Steps:
    """Take the pieces that have arrived."""
    for each in receiving:
        while not each.complete and each.first() is not None:
            each.take()
            yield True


def bits(rate: float | None) -> int:
    """Return a learning rate as a word; that of NaN for None."""
    return int(np.float64(math.nan if rate is None else rate).view(np.int64))


def rate_of(word: int) -> float | None:
    """Return the learning rate of a word."""
    rate = float(np.int64(word).view(np.float64))
    return None if math.isnan(rate) else rate

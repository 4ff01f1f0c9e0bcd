"""The agent of a node: it gets parameters for ranks, and sends what a server publishes.

A rank that waits for a version asks its own agent, which asks the root's, once however
many ranks wait. When there is such a version, the agent of each server sends its part.
A single server sends what is the newest by then. Several servers send what was ordered,
so that all parts that a node gets are of one version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.nodes import (
    Incoming,
    Service,
    StepQueue,
    is_short,
    pieces_in,
    send_pieces,
)
from hpcaccum.server.parameter_copies import NOTHING, copying
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.nodes import Agent, Steps
    from hpcaccum.server.double_buffer import DoubleBuffer
    from hpcaccum.server.parameter_copies import Copier, Message

# No version: of a node that has none.
_NONE = -1


class ParameterAgent(Service):
    """The service of one node's agent for a `Publisher`. Collective.

    Args:
        agent, nodes, parts, copier, copies, own: See `Publisher`.
        complete: Publishes to this node what ``copies.begin`` returned memory for.

    Attributes:
        turns: Runs what the agent of a server does, one after the other.
    """

    def __init__(
        self,
        agent: Agent,
        nodes: Sequence[int],
        parts: Sequence[slice],
        copier: Copier,
        copies: DoubleBuffer,
        own: DoubleBuffer | None,
        complete: Callable[[int], None],
    ) -> None:
        self._nodes, self._parts, self._copier = nodes, parts, copier
        self._copies, self._own, self._complete = copies, own, complete
        # On the root's node: the newest version; what each node has asked for last, and
        # the last that was promised to it.
        self._newest = _NONE
        self._wants: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        # On a server's node: of each node, what is on its way, the last version sent,
        # and its place.
        self.turns, self._sending = StepQueue(self._run_steps), self.queues()
        self._messages: list[Message] = []
        self._reading = False
        self._sent: dict[int, int] = {}
        self._places: dict[int, int] = {}
        # The versions for which ranks of this node wait, and the one that it has asked
        # for; the one that it receives, and the servers whose parts of it are missing.
        self._waiting: set[int] = set()
        self._asked: int | None = None
        self._receiving: int | None = None
        self._lacks: set[int] = set()
        agent.add(self)

    # For the ranks of this node

    def _do_fetch(self, version: int) -> None:
        """Ask for a version for this node, once."""
        if self._copies.version() < version:
            self._waiting.add(version)
            self._ask()

    def _ask(self) -> None:
        """Ask for the least version that ranks wait for, unless it was asked for."""
        least = min(self._waiting, default=None)
        if least is not None and (self._asked is None or least < self._asked):
            self._asked = least
            self.tell(self._nodes[:1], "want", self.agent.node, least)

    def expect(self, version: int) -> None:
        """Receive a version that several servers send to this node, after earlier ones.

        They do not announce it.
        """
        for server, part in enumerate(self._parts):
            if self._nodes[server] != self.agent.node:
                nbytes = (part.stop - part.start) * self._copier.sent.itemsize
                self._run_steps(self._do_take(server, version, nbytes, None))

    _do_expect = expect

    def _do_take(
        self, server: int, version: int, nbytes: int, contents: bytes | Array | None
    ) -> Steps:
        """Receive the part of a server, unless the request contains it."""
        while self._receiving not in (None, version):
            yield False
        if self._receiving is None:
            if contents is not None and version <= self._copies.version():
                # The root and its agent have sent it.
                return
            self._receiving, self._lacks = version, set(range(len(self._parts)))
            self._copies.begin(version)
        flat = self._copies.copy(self._copies.writing)[self._parts[server]]
        message = self._copier.room(nbytes, flat)
        if contents is None:
            yield from self._receive(server, message)
        else:
            yield from copying(np.frombuffer(contents, np.uint8), message)
        yield from self._copier.unpack(message, flat, self._copies)
        self._lacks.remove(server)
        if not self._lacks:
            self._arrived(version)

    @traced("receive")
    def _receive(self, server: int, message: Array) -> Steps:
        rank, tag = self.agent.leaders[self._nodes[server]], self.tag()
        incoming = Incoming(self.agent.comm, rank, tag, pieces_in(message))
        while not incoming.complete:
            if incoming.first() is None:
                yield False
            else:
                incoming.take()
                yield True

    def _arrived(self, version: int) -> None:
        """Let ranks read a version; ask for the next one that they wait for."""
        self._complete(version)
        self._receiving = self._asked = None
        self._waiting = {each for each in self._waiting if each > version}
        self._ask()

    # On the root's node

    def _do_want(self, node: int, version: int) -> None:
        """Have a version sent to a node, now or when it is made."""
        if version <= self._promised.get(node, _NONE):
            return
        if version > self._newest:
            # It asks for a later one than before only when it has got that.
            self._wants[node] = version
            return
        self._promise([node])
        self.send_promised([node])

    def promise(self, version: int, nodes: Collection[int] = ()) -> list[int]:
        """Note a version, the newest; return the nodes to which it must be sent.

        Args:
            version: The version.
            nodes: Those that wait for it and do not ask.
        """
        self._newest = version
        ready = {node for node, wanted in self._wants.items() if wanted <= version}
        ready.update(nodes)
        self._promise(ready)
        return sorted(ready)

    def _promise(self, nodes: Collection[int]) -> None:
        for node in nodes:
            self._promised[node] = self._newest
            # What the root itself has sent is there before the agent knows of it, so
            # the node may want a later one by now.
            if self._wants.get(node, _NONE) <= self._newest:
                self._wants.pop(node, None)

    def send_promised(self, nodes: list[int]) -> None:
        """Have the servers send the newest version to nodes."""
        self.tell(self._nodes, "send", self._newest, nodes)
        if len(self._parts) > 1:
            self.tell(nodes, "expect", self._newest)

    def _do_published(self, version: int, nodes: list[int], pushed: bool) -> None:
        """Send a version of a single server to nodes; not again if the root has."""
        ready = self.promise(version, nodes)
        if pushed:
            newer = {node: max(version, self._sent.get(node, 0)) for node in nodes}
            self._sent |= newer
        if ready:
            self._do_send(version, ready)

    # On a server's node

    def _do_send(self, version: int, nodes: list[int]) -> None:
        """Send a version to nodes, after all that was ordered before."""
        if len(self._parts) == 1:
            self._begin_to_send(version, nodes)
        else:
            self.turns.add(self.sending(version, nodes))

    def sending(self, version: int, nodes: list[int]) -> Steps:
        """Return steps that begin to send a part to nodes, as it is now."""
        assert self._own is not None
        published = self._own.has(version)
        while not published():
            yield False
        if nodes:
            message = yield from self._message(NOTHING)
            message.users += len(nodes)
            self._begin_to_send(version, nodes, message)

    def _begin_to_send(
        self, version: int, nodes: list[int], message: Message | None = None
    ) -> None:
        for node in self.agent.in_turn(nodes):
            self._sending[node].add(self._send_to(node, version, message))

    def _send_to(self, node: int, version: int, message: Message | None) -> Steps:
        """Send a message to a node; by default, the newest version."""
        if message is None:
            if self._sent.get(node, _NONE) >= version:
                return
            message = yield from self._message(self._places.get(node, NOTHING))
            message.users += 1
        self._sent[node], self._places[node] = message.version, message.place
        server = self._nodes.index(self.agent.node)
        data, take = message.data, (server, message.version, message.data.size)
        if node == self.agent.node:
            yield from self._do_take(*take, data)
        elif len(self._parts) > 1:
            yield from self._send(node, data)
        else:
            contents = data.tobytes() if is_short(data.size) else None
            self.tell([node], "take", *take, contents)
            if contents is None:
                yield from self._send(node, data)
        message.users -= 1

    @traced("send", lambda args, _: {"to": args[0].agent.leaders[args[1]]})
    def _send(self, node: int, message: Array) -> Steps:
        rank, tag = self.agent.leaders[node], self.tag()
        return send_pieces(self.agent.comm, rank, tag, pieces_in(message))

    def _message(self, since: int) -> Generator[bool, None, Message]:
        """Return a message with the newest version.

        A node that is slow must delay neither updates nor other nodes.
        """
        assert self._own is not None
        while self._reading:
            # It may be the same one.
            yield False
        version, copy = self._own.newest()
        for found in self._messages:
            if (found.version, found.since) == (version, since):
                return found
        self._reading = True
        message = self._copier.message(since, self._spare())
        yield from message.reading(self._own.copy(copy))
        while not self._own.has_kept(version, copy):
            yield False
            version, copy = self._own.newest()
            yield from message.reading(self._own.copy(copy))
        self._reading = False
        message.complete(version)
        self._messages.append(message)
        return message

    def _spare(self) -> Array | None:
        """Return the memory of a message that nobody uses, if there is one."""
        for each in self._messages:
            if not each.users:
                self._messages.remove(each)
                return each.data
        return None

    def free(self, what: str) -> None:
        """End the service, when all that was asked for is sent. Collective."""
        self.agent.remove(self.number, what)
        self._messages.clear()

"""Parameters that servers publish and all ranks read from memory of their node.

Each server publishes its part; a single server has all. Every node has a copy of all
parts, in a `DoubleBuffer`. The ranks on the node of a single server read what it
publishes; other nodes get it from its agent: the newest by then. Several servers send
what was ordered, so that all parts that a node gets are of one version.

What is published, sent and asked for are versions: a step has another one for each time
that values are assigned between two updates.

Requests to agents:

fetch: A rank asks its own agent for a version, unless the root knows that it waits.
want: The agent of a node asks the root's agent for it, once however many ranks wait.
published: The root says that there is a new version, and which nodes wait for it.
take: The agent of the single server sends a version to the agent of a node.
send, expect: With several servers, the root's agent has their agents send their parts,
    and has the agent of a node receive them.
made: The agent of one of several servers says that it has made its part.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence

import numpy as np

from hpcaccum.deadline import Deadline, Waiting
from hpcaccum.dtypes import Array
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import Group
from hpcaccum.nodes import (
    Agent,
    Incoming,
    Place,
    Service,
    StepQueue,
    Steps,
    is_short,
    pieces_in,
    send_pieces,
    words_of,
)
from hpcaccum.server.double_buffer import DoubleBuffer, step_of, writer_inside
from hpcaccum.server.parameter_copies import NOTHING, Copier, Message, copying
from hpcaccum.spans import traced

# For so many seconds after a step has come, a rank does not ask for a newer one: the
# answer may be as old.
_RECENT = 1e-3
# Words of the root: the newest version; of several servers, the last of each, for
# messages of all ranks.
_NEWEST, _MADE = 0, 1
# No version: of a node that has none.
_NONE = -1


class Promises:
    """Which version each node waits for or will get; on the root's node."""

    def __init__(self) -> None:
        self.newest = _NONE
        # What each node has asked for last, and the last that was promised to it.
        self._wants: dict[int, int] = {}
        self._promised: dict[int, int] = {}

    def want(self, node: int, version: int) -> bool:
        """Note what a node asks for; return whether the newest must be sent to it."""
        if version <= self._promised.get(node, _NONE):
            return False
        if version > self.newest:
            # It asks for a later one than before only when it has got that.
            self._wants[node] = version
            return False
        self._promise([node])
        return True

    def publish(self, version: int, nodes: Collection[int]) -> list[int]:
        """Note the newest version; return the nodes to which it must be sent.

        Among them are ``nodes``, which wait for it and do not ask.
        """
        self.newest = version
        ready = {node for node, wanted in self._wants.items() if wanted <= version}
        ready.update(nodes)
        self._promise(ready)
        return sorted(ready)

    def _promise(self, nodes: Collection[int]) -> None:
        for node in nodes:
            self._promised[node] = self.newest
            # What the root itself has sent is there before the agent knows of it, so
            # the node may want a later one by now.
            if self._wants.get(node, _NONE) <= self.newest:
                self._wants.pop(node, None)


class Messages:
    """Messages with what a server has published; nodes that lack the same share one."""

    def __init__(self, copier: Copier, own: DoubleBuffer) -> None:
        self._copier, self._own = copier, own
        self._kept: list[Message] = []
        self._reading = False

    def newest(self, since: int) -> Generator[bool, None, Message]:
        """Return a message with the newest version.

        A node that is slow must delay neither updates nor other nodes.
        """
        while self._reading:
            # It may be the same one.
            yield False
        version, copy = self._own.newest()
        for found in self._kept:
            if (found.version, found.since) == (version, since):
                return found
        self._reading = True
        spare = next((each for each in self._kept if not each.users), None)
        if spare is not None:
            self._kept.remove(spare)
        message = self._copier.message(since, spare.data if spare else None)
        yield from message.reading(self._own.copy(copy))
        while not self._own.has_kept(version, copy):
            yield False
            version, copy = self._own.newest()
            yield from message.reading(self._own.copy(copy))
        self._reading = False
        message.complete(version)
        self._kept.append(message)
        return message

    def clear(self) -> None:
        """Free their memory."""
        self._kept.clear()


class Publisher(Service):
    """The parameters of one or several servers, a flat vector. Collective.

    Each of the ``servers``, the root first, publishes the part of the same number. The
    ``copier`` copies between vectors and variables.

    Attributes:
        nodes: Of the servers.
        server_here: Number of the server of this node; -1 if there is none.
        copies: Where the ranks of this node read.
        own: Where the server of this node publishes its part; only if there is one.
        waiting: For what the writer of this node's copies, or its agent, changes.
        turns: Runs what the agent of a server does, one after the other.
    """

    def __init__(
        self,
        group: Group,
        servers: Sequence[int],
        parts: Sequence[slice],
        copier: Copier,
        what: str,
    ) -> None:
        root, several = servers[0], len(servers) > 1
        self._what, self._servers, self._node_of = what, servers, group.node_of
        self._parts, self._copier = parts, copier
        self.nodes = [group.node_of[each] for each in servers]
        here, self._alone = group.node_number, group.single_node
        self.server_here = self.nodes.index(here) if here in self.nodes else -1
        # Whether the ranks of this node read what the single server writes.
        self._is_here = not several and self.server_here == 0
        inside, writer = writer_inside(group, root)
        if several:
            writer = 0
        self.waiting = Waiting(blocks=inside.rank == writer)
        # When a step has come for which this rank waited.
        self._came = -math.inf
        with contextlib.ExitStack() as undo:
            self.copies = DoubleBuffer(inside, writer, copier.size, copier.dtype)
            undo.callback(self.copies.free)
            if self._is_here:
                self.own = self.copies
            elif self.server_here >= 0:
                # Collective on the node, so all of its ranks allocate or none.
                part = parts[self.server_here]
                server = group.node_ranks.index(servers[self.server_here])
                size = part.stop - part.start
                self.own = DoubleBuffer(inside, server, size, copier.dtype)
                undo.callback(self.own.free)
            if not self._alone:
                self._count = _MADE + several * len(servers)
                self._words = words_of(group, root, self._count, what)
                undo.callback(self._words.free)
                self._join(Agent.of(group))
            undo.pop_all()

    def _join(self, agent: Agent) -> None:
        self.promises = Promises()
        # On a server's node: of each node, what is on its way, the last version sent,
        # and its place.
        self.turns, self._sending = StepQueue(self._run_steps), self.queues()
        if self.server_here >= 0:
            self._messages = Messages(self._copier, self.own)
        self._sent: dict[int, int] = {}
        self._places: dict[int, int] = {}
        # The versions for which ranks of this node wait, and the one that it has asked
        # for; the one that it receives, and the servers whose parts of it are missing.
        self._wanted: set[int] = set()
        self._asked: int | None = None
        self._receiving: int | None = None
        self._lacks: set[int] = set()
        agent.add(self)

    # Every rank

    def version(self) -> int:
        """Return the step that this node has; a load. -1 before the first one."""
        return step_of(self.copies.version())

    def newest_version(self) -> int:
        """Return the newest version that a rank may have; across nodes a round trip."""
        return self.copies.version() if self._is_here else self._words.read(_NEWEST)

    def newest(self) -> int:
        """Return the step of `newest_version`."""
        return step_of(self.newest_version())

    def recent(self) -> int:
        """Return the newest step, as of a moment ago: soon after a wait, a load."""
        if time.monotonic() - self._came < _RECENT:
            return self.version()
        return self.newest()

    def wait_for(
        self,
        version: int,
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
        *,
        comes: bool = False,
    ) -> None:
        """Wait until this node has a version, or a newer one.

        If the root knows that this node waits for it, it ``comes`` unasked. If it is
        not published, ``missing`` returns what it waits for.
        """
        if not comes:
            self.fetch(version)
        self.waiting.wait(
            self.copies.has(version),
            deadline,
            lambda: self.under_way(version) or missing(),
            meanwhile,
        )
        self._came = time.monotonic()

    def fetch(self, version: int) -> None:
        """Have a version sent to this node, unless its ranks read it where it is."""
        if not self._is_here:
            self.tell([self.agent.node], "fetch", version)

    def under_way(self, version: int) -> str | None:
        """Return what moves or makes a version; None if it is not published."""
        if self._is_here:
            return None
        newest, *made = self._words.read_range(_NEWEST, self._count)
        if newest < version:
            return None
        agent, step = self.agent, step_of(version)
        behind = [n for n, each in enumerate(made) if each < version]
        if not behind:
            sources, here = agent.describe(self.nodes), agent.describe([agent.node])
            return f"step {step}, on its way from {sources} to {here}"
        ranks = format_ranks([self._servers[n] for n in behind])
        nodes = agent.describe(self.nodes[n] for n in behind)
        return f"update {step} by {ranks}, servers of {nodes}"

    def complete_here(self, version: int) -> None:
        """Let the ranks of this node read what `copies.begin` returned memory for."""
        self.copies.complete(version)
        self.waiting.wake()

    # A server

    def complete(self, version: int, awaited: Iterable[Place] = ()) -> None:
        """Publish what was written since ``own.begin``.

        A single server sends it unasked to the nodes of these places, whose ranks wait.
        """
        if not self._is_here:
            # Those who wait for it are named in the order to make it.
            self.own.complete(version)
            return
        if self._alone:
            self.complete_here(version)
            return
        # Before any rank can have this version, `newest_version` must return it.
        self.announce(version)
        nodes = {self._node_of[each.rank] for each in awaited} - set(self.nodes)
        pushed = self._push(version, nodes)
        self.complete_here(version)
        self.tell(self.nodes, "published", version, nodes, pushed)

    def _push(self, version: int, nodes: set[int]) -> bool:
        """Send a version to nodes, if it is short; return whether it is.

        The agent would have to be woken, and to wait for the interpreter.
        """
        flat = self.copies.copy(self.copies.writing)
        if not (self._copier.whole and is_short(flat.nbytes)):
            return False
        for node in nodes:
            self.tell([node], "take", 0, version, flat.nbytes, flat.tobytes())
        return True

    def announce(self, version: int) -> None:
        """Set the newest version; the root only."""
        self._words.write(_NEWEST, version)

    # The root's node, of several servers

    def begin(self, version: int) -> None:
        """Say that all servers publish a first version; the root only."""
        self.announce(version)
        for server in range(len(self.nodes)):
            self.note_made(server, version)
        self.tell(self.nodes[:1], "published", version, [], False)

    def note_made(self, server: int, version: int) -> None:
        """Note the newest version of a server."""
        self._words.write(_MADE + server, version)
        self.waiting.wake()

    _do_made = note_made

    def made(self) -> int:
        """Return the version that all servers have made."""
        return min(self._words.read_range(_MADE, len(self._servers)))

    # The agent of a node: what ranks of the node ask for

    def _do_fetch(self, version: int) -> None:
        if self.copies.version() < version:
            self._wanted.add(version)
            self._ask()

    def _ask(self) -> None:
        """Ask for the least version that ranks wait for, unless it was asked for."""
        least = min(self._wanted, default=None)
        if least is not None and (self._asked is None or least < self._asked):
            self._asked = least
            self.tell(self.nodes[:1], "want", self.agent.node, least)

    def expect(self, version: int) -> None:
        """Receive a version that several servers send to this node, after earlier ones.

        They do not announce it.
        """
        for server, part in enumerate(self._parts):
            if self.nodes[server] != self.agent.node:
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
            if contents is not None and version <= self.copies.version():
                # The root and its agent have sent it.
                return
            self._receiving, self._lacks = version, set(range(len(self._parts)))
            self.copies.begin(version)
        flat = self.copies.copy(self.copies.writing)[self._parts[server]]
        message = self._copier.room(nbytes, flat)
        if contents is None:
            yield from self._receive(server, message)
        else:
            yield from copying(np.frombuffer(contents, np.uint8), message)
        yield from self._copier.unpack(message, flat, self.copies)
        self._lacks.remove(server)
        if not self._lacks:
            self.complete_here(version)
            self._receiving = self._asked = None
            self._wanted = {each for each in self._wanted if each > version}
            self._ask()

    @traced("receive")
    def _receive(self, server: int, message: Array) -> Steps:
        rank, tag = self.agent.leaders[self.nodes[server]], self.tag()
        return Incoming(self.agent.comm, rank, tag, pieces_in(message)).taking()

    # On the root's node

    def _do_want(self, node: int, version: int) -> None:
        """Have a version sent to a node, now or when it is made."""
        if self.promises.want(node, version):
            self._send_promised([node])

    def _do_published(self, version: int, nodes: list[int], pushed: bool) -> None:
        """Send a version to nodes that wait for it, unless the root has sent it."""
        ready = self.promises.publish(version, nodes)
        for node in nodes if pushed else ():
            self._sent[node] = max(version, self._sent.get(node, _NONE))
            ready.remove(node)
        self._send_promised(ready)

    def _send_promised(self, nodes: list[int]) -> None:
        """Have the servers send the newest version to nodes."""
        newest = self.promises.newest
        if len(self._parts) == 1:
            self._begin_to_send(newest, nodes)
        elif nodes:
            self.tell(self.nodes, "send", newest, nodes)
            self.tell(nodes, "expect", newest)

    # On a server's node

    def _do_send(self, version: int, nodes: list[int]) -> None:
        """Send a part to nodes, after all that was ordered before."""
        self.turns.add(self.sending(version, nodes))

    def sending(self, version: int, nodes: list[int]) -> Steps:
        """Return steps that begin to send a part to nodes, as it is now."""
        published = self.own.has(version)
        while not published():
            yield False
        if nodes:
            message = yield from self._messages.newest(NOTHING)
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
            since = self._places.get(node, NOTHING)
            message = yield from self._messages.newest(since)
            message.users += 1
        self._sent[node], self._places[node] = message.version, message.place
        server = self.nodes.index(self.agent.node)
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

    def free(self) -> None:
        """Free the memory, after the last version is published. Collective."""
        if not self._alone:
            # When all that was asked for is sent.
            self.agent.remove(self.number, f"{self._what}: free")
            if self.server_here >= 0:
                self._messages.clear()
            self._words.free()
        if self.server_here >= 0 and not self._is_here:
            self.own.free()
        self.copies.free()

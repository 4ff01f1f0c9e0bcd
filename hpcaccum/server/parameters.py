"""Parameters that one rank publishes and all ranks read from memory of their node.

The ranks of the publisher's node read its `DoubleBuffer`. Every other node has a copy
of its own. Its agent asks for a newer step when one of its ranks waits for it, unless
the publisher knows that. What is sent is always the newest, and only where it is
awaited. Long parameters are never sent twice.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.nodes import (
    Agent,
    Incoming,
    is_short,
    one_range,
    pieces_of,
    send_pieces,
    words_of,
)
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.messages import NOTHING, Draft, Messages
from hpcaccum.server.node_copy import NodeCopy, step_of, version_of, writer_inside
from hpcaccum.spans import steps, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Steps

# No version: where there are no parameters.
_NONE = -1


@dataclass(eq=False)
class _Snapshot:
    """A message that agents send, while the publisher goes on.

    Attributes:
        message: Bytes.
        version: Of the parameters.
        since: See `Messages.draft`.
        place: See `Draft`.
        users: How many agents it is being sent to.
    """

    message: Array
    version: int
    since: int = NOTHING
    place: int = NOTHING
    users: int = 0


class Parameters(NodeCopy):
    """The parameters of a single server, a flat vector with a step. Collective.

    The rank ``root`` publishes it; each time, the step is larger.

    Args:
        group: The ranks.
        root: The rank that publishes.
        size, dtype: Of the vector.
        what: Name for error messages.
        messages: What agents send of the vector; by default all of it.
    """

    def __init__(
        self,
        group: Group,
        root: int,
        size: int,
        dtype: Any,
        what: str,
        messages: Messages | None = None,
    ) -> None:
        self._what, self._messages = what, messages or Messages()
        inside, writer = writer_inside(group, root)
        self._is_here = group.single_node or root in group.node_ranks
        # On the leader of the publisher's node: what is being sent, to which nodes; of
        # each of them, the last step sent and its place.
        self._snapshots: list[_Snapshot] = []
        self._sending: set[int] = set()
        self._sent: dict[int, int] = {}
        self._places: dict[int, int] = {}
        # On other leaders: the steps that are asked for, and whether one is received.
        self._asked: set[int] = set()
        self._receiving = False
        # Whether no step will be published any more.
        self._closing = False
        with contextlib.ExitStack() as undo:
            copies = DoubleBuffer(inside, writer, size, dtype)
            super().__init__(copies, written_here=inside.rank == writer)
            undo.callback(self.copies.free)
            self._agent = None if group.single_node else self._join(group, root)
            undo.pop_all()

    def _join(self, group: Group, root: int) -> Agent:
        self._words = words_of(group, root, 1)
        self._source, self._node_of = group.node_of[root], group.node_of
        agent = Agent.of(group)
        self._number = agent.add(self)
        return agent

    def newest_version(self) -> int:
        """Return what the root has published; across nodes a round trip."""
        return self.copies.version() if self._is_here else self._words.read(0)

    def publish(
        self, fill: Callable[[Array], None], step: int, awaited_by: Iterable[int] = ()
    ) -> None:
        """Write a new step, larger than all before; the root only."""
        self._publish(fill, version_of(step), awaited_by)

    def publish_again(self, fill: Callable[[Array], None]) -> int:
        """Write another version of the newest step, and return it; the root only."""
        version = self.copies.version() + 1
        self._publish(fill, version, ())
        return version

    def _publish(
        self, fill: Callable[[Array], None], version: int, awaited_by: Iterable[int]
    ) -> None:
        flat = self.copies.begin(version)
        fill(flat)
        if self._agent is not None:
            # Before any rank can have this version, `newest_version` must return it.
            self._words.write(0, version)
            nodes = {self._node_of[rank] for rank in awaited_by} - {self._source}
            self._push(flat, version, nodes)
        self.complete(version)
        if self._agent is not None:
            # Nodes wait for it.
            self._agent.wake()

    def _push(self, flat: Array, version: int, nodes: set[int]) -> None:
        """Send a version to nodes, or have the agent of the root's node send it.

        The agent would have to be woken, and to wait for the interpreter.
        """
        if not (self._messages.whole and is_short(flat.nbytes)):
            if nodes:
                self._request(self._source, "push", version, nodes)
            return
        for node in nodes:
            self._request(node, "take", version, flat.nbytes, flat.tobytes())
            # So the agent does not send it, too, if the node has asked for it.
            self._sent[node] = version

    def _request(self, node: int, *request: Any) -> None:
        assert self._agent is not None
        self._agent.request(node, self._number, *request)

    def _ask_for(self, version: int) -> None:
        if self._agent is not None and not self._is_here:
            # The agent asks the root's, which answers when it is published.
            self._request(self._agent.node, "fetch", version)

    def _under_way(self, version: int) -> str | None:
        """Return which agents move a version; None if it is not published."""
        agent = self._agent
        if agent is None or self._is_here or self.newest_version() < version:
            return None
        source, here = agent.describe([self._source]), agent.describe([agent.node])
        return f"step {step_of(version)}, on its way from {source} to {here}"

    # The agents

    def handle(self, source: int, kind: str, *request: Any) -> Steps:
        """Return the steps that carry out a request."""
        steps: Steps = getattr(self, f"_do_{kind}")(*request)
        return steps

    def _do_fetch(self, version: int) -> Steps:
        """Ask for a version for this node, or a newer one.

        Ranks may wait for different steps. Each is asked for once, however many ranks
        wait for it.
        """
        assert self._agent is not None
        if self.copies.version() < version and version not in self._asked:
            self._asked.add(version)
            self._request(self._source, "send", self._agent.node, version)
        return iter(())

    def _do_take(self, version: int, nbytes: int, contents: bytes | None) -> Steps:
        """Receive parameters, which a short message contains."""
        while self._receiving:
            yield False
        if contents is not None and version <= self.copies.version():
            # The root and its agent have sent it.
            return
        self._receiving = True
        message = self._messages.room(nbytes, self.copies.begin(version))
        if contents is None:
            yield from self._receive(message)
        else:
            message[:] = np.frombuffer(contents, np.uint8)
        self._messages.unpack(message, self.copies)
        self.complete(version)
        self._asked = {each for each in self._asked if each > version}
        self._receiving = False

    @traced("receive", wrap=steps)
    def _receive(self, message: Array) -> Steps:
        assert self._agent is not None
        comm, tag = self._agent.comm, self._agent.tag(self._number)
        pieces = pieces_of([slice(0, message.size)], 1)
        source = self._agent.leaders[self._source]
        incoming = Incoming(comm, source, tag, pieces, one_range(message))
        while not incoming.complete:
            if incoming.first() is None:
                yield False
            else:
                incoming.take()

    def _do_push(self, version: int, nodes: set[int]) -> Steps:
        """Send a version to nodes."""
        assert self._agent is not None
        for node in nodes:
            self._agent.run(self._number, self._do_send(node, version))
        return iter(())

    def _do_send(self, node: int, wanted: int) -> Steps:
        """Send the newest parameters to a node, once they are of a version or newer."""
        published = self.copies.has(wanted)
        while not published():
            if self._closing:
                return
            yield False
        while node in self._sending:
            yield False
        if self._sent.get(node, _NONE) >= wanted:
            return
        self._sending.add(node)
        snapshot = yield from self._snapshot(self._places.get(node, NOTHING))
        self._sent[node], self._places[node] = snapshot.version, snapshot.place
        yield from self._send_snapshot(node, snapshot)
        snapshot.users -= 1
        self._sending.discard(node)

    @traced("send", lambda args, _: {"to": args[1]}, steps)
    def _send_snapshot(self, node: int, snapshot: _Snapshot) -> Steps:
        assert self._agent is not None
        message, nbytes = snapshot.message, snapshot.message.size
        contents = message.tobytes() if is_short(nbytes) else None
        self._request(node, "take", snapshot.version, nbytes, contents)
        if contents is None:
            comm, rank = self._agent.comm, self._agent.leaders[node]
            tag = self._agent.tag(self._number)
            pieces = pieces_of([slice(0, nbytes)], 1)
            yield from send_pieces(comm, rank, tag, pieces, one_range(message))

    def _snapshot(self, since: int) -> Generator[bool, None, _Snapshot]:
        """Return a message with the newest parameters, for one more user.

        A node that is slow must delay neither updates nor other nodes.
        """
        draft: Draft | None = None
        while True:
            newest = self.copies.version()
            for found in self._snapshots:
                if (found.version, found.since) == (newest, since):
                    found.users += 1
                    return found
            draft = draft or self._messages.draft(since, self._spare())
            if (version := self.copies.try_read(draft.read)) is not None:
                made = _Snapshot(draft.message(), version, since, draft.place, users=1)
                self._snapshots.append(made)
                return made
            yield False

    def _spare(self) -> Array | None:
        """Return the memory of a message that nobody uses, if there is one."""
        for each in self._snapshots:
            if not each.users:
                self._snapshots.remove(each)
                return each.message
        return None

    def free(self) -> None:
        """Free the memory, after the last version is published. Collective."""
        self._closing = True
        if self._agent is not None:
            self._agent.remove(self._number, f"{self._what}: free")
            self._words.free()
        self._snapshots.clear()
        self.copies.free()

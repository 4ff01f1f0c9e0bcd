"""Parameters that one rank publishes and all ranks read from memory of their node.

The ranks of the publisher's node read its `DoubleBuffer`. Every other node has a copy
of its own, which its agent fetches when one of its ranks waits for a newer step. What
is sent is always the newest, never twice the same, and only where it is awaited.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.mpi import AtomicWords
from hpcaccum.nodes import Agent, Incoming, one_range, pieces_of, send_pieces
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.messages import NOTHING, Draft, Messages
from hpcaccum.server.node_copy import NodeCopy, writer_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Steps

Array = np.ndarray[Any, Any]

# No step: where there are no parameters.
_NONE = -1


@dataclass(eq=False)
class _Snapshot:
    """A message that agents send, while the publisher goes on.

    Attributes:
        message: Bytes.
        step: Of the parameters.
        since: See `Messages.draft`.
        place: See `Draft`.
        users: How many agents it is being sent to.
    """

    message: Array
    step: int
    since: int = NOTHING
    place: int = NOTHING
    users: int = 0


class Parameters(NodeCopy):
    """A flat vector of the rank ``root``, with a step that increases. Collective.

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
        self._is_here = group.single_node or root in group.nodes[group.node_number]
        # On the leader of the publisher's node: what is being sent, to which ranks; of
        # each of them, the last step sent and its place.
        self._snapshots: list[_Snapshot] = []
        self._sending: set[int] = set()
        self._sent: dict[int, int] = {}
        self._places: dict[int, int] = {}
        # On other leaders: the steps that are asked for, and whether a fetch receives.
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
        self._words = AtomicWords(group, root, 1)
        self._source = next(n for n, ranks in enumerate(group.nodes) if root in ranks)
        agent = Agent.of(group)
        self._number = agent.add(self)
        return agent

    def newest(self) -> int:
        """Return the step that the root has published; across nodes a round trip."""
        return self.copies.version() if self._is_here else self._words.read(0)

    def publish(self, fill: Callable[[Array], None], step: int) -> None:
        """Write a new step, larger than all before; the root only.

        Args:
            fill: Writes all of the vector that it is given.
            step: Of the vector.
        """
        fill(self.copies.begin(step))
        if self._agent is not None:
            # First: no rank may have a step before `newest` returns it.
            self._words.write(0, step)
        self.complete(step)
        if self._agent is not None:
            # Nodes wait for it.
            self._agent.wake()

    def _ask_for(self, step: int) -> None:
        if self._agent is not None and not self._is_here:
            # The agent asks the root's, which answers when the step is published.
            self._agent.request(self._agent.node, self._number, "fetch", step)

    def _under_way(self, step: int) -> str | None:
        """Return which agents move a step; None if it is not published."""
        agent = self._agent
        if agent is None or self._is_here or self.newest() < step:
            return None
        source, here = agent.describe([self._source]), agent.describe([agent.node])
        return f"step {step}, on its way from {source} to {here}"

    # The agent

    def handle(self, source: int, kind: str, step: int) -> Steps:
        """Return the steps that fetch parameters, or send them."""
        return self._fetch(step) if kind == "fetch" else self._send(source, step)

    def _fetch(self, wanted: int) -> Steps:
        """Fetch a step for this node, or a newer one.

        Ranks may wait for different steps. Each step is asked for once, however many
        ranks wait for it, and one fetch at a time receives what comes first.
        """
        if self.version() >= wanted or wanted in self._asked:
            return
        assert self._agent is not None
        self._asked.add(wanted)
        self._agent.request(self._source, self._number, "send", wanted)
        # Until it is answered, by any fetch of this node that receives.
        while wanted in self._asked:
            if self._receiving:
                yield False
            else:
                self._receiving = True
                yield from self._receive()
                self._receiving = False

    def _receive(self) -> Steps:
        """Receive parameters, or that a step will not come."""
        assert self._agent is not None
        comm, tag = self._agent.comm, self._agent.tag(self._number)
        source, header = self._agent.leaders[self._source], np.empty(2, np.int64)
        received = comm.Irecv(header, source, tag)
        while not received.Test():
            yield False
        step, nbytes = header.tolist()
        if step < 0:
            self._asked.discard(~step)
            return
        message = self._messages.room(nbytes, self.copies.begin(step))
        pieces = pieces_of([slice(0, nbytes)], 1)
        incoming = Incoming(comm, source, tag, pieces, one_range(message))
        while not incoming.complete:
            if incoming.first() is None:
                yield False
            else:
                incoming.take()
        self._messages.unpack(message, self.copies)
        self.complete(step)
        self._asked = {each for each in self._asked if each > step}

    def _send(self, rank: int, wanted: int) -> Steps:
        """Send the newest parameters to an agent, once they are of a step or newer."""
        published = self.copies.has(wanted)
        while not (published() or self._closing):
            yield False
        while rank in self._sending:
            yield False
        sent = self._sent.get(rank, _NONE)
        if sent >= wanted:
            return
        self._sending.add(rank)
        since = self._places.get(rank, NOTHING)
        snapshot = yield from self._snapshot(wanted, since)
        if snapshot.step >= 0:
            self._sent[rank], self._places[rank] = snapshot.step, snapshot.place
        yield from self._send_snapshot(rank, snapshot)
        snapshot.users -= 1
        self._sending.discard(rank)

    def _send_snapshot(self, rank: int, snapshot: _Snapshot) -> Steps:
        assert self._agent is not None
        comm, tag = self._agent.comm, self._agent.tag(self._number)
        message = snapshot.message
        header = np.array([snapshot.step, message.size])
        request = comm.Isend(header, rank, tag)
        pieces = pieces_of([slice(0, message.size)], 1)
        yield from send_pieces(comm, rank, tag, pieces, one_range(message))
        while not request.Test():
            yield False

    def _snapshot(self, wanted: int, since: int) -> Generator[bool, None, _Snapshot]:
        """Return a message with the newest parameters, for one more user.

        A node that is slow must delay neither updates nor other nodes.

        Args:
            wanted: The step that the user lacks.
            since: See `Messages.draft`.

        Returns:
            If there will never be what is wanted, no parameters, and its complement as
            their step.
        """
        draft: Draft | None = None
        while (newest := self.version()) >= wanted:
            for found in self._snapshots:
                if (found.step, found.since) == (newest, since):
                    found.users += 1
                    return found
            draft = draft or self._messages.draft(since, self._spare())
            if (step := self.copies.try_read(draft.read)) is not None:
                made = _Snapshot(draft.message(), step, since, draft.place, users=1)
                self._snapshots.append(made)
                return made
            yield False
        return _Snapshot(np.empty(0, np.uint8), ~wanted)

    def _spare(self) -> Array | None:
        """Return the memory of a message that nobody uses, if there is one."""
        for each in self._snapshots:
            if not each.users:
                self._snapshots.remove(each)
                return each.message
        return None

    def free(self) -> None:
        """Free the memory, after the last step is published. Collective."""
        self._closing = True
        if self._agent is not None:
            self._agent.remove(self._number, f"{self._what}: free")
            self._words.free()
        self._snapshots.clear()
        self.copies.free()

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
from hpcaccum.nodes import Agent, Incoming, pieces_of, send_pieces
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.node_copy import NodeCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group
    from hpcaccum.nodes import Steps

Array = np.ndarray[Any, Any]

# No step: where there are no parameters.
_NONE = -1


@dataclass
class _Snapshot:
    """A copy that agents send from, while the publisher goes on."""

    vector: Array
    step: int = _NONE
    users: int = 0


class Parameters(NodeCopy):
    """A flat vector of the rank ``root``, with a step that increases. Collective.

    Args:
        group: The ranks.
        root: The rank that publishes.
        size, dtype: Of the vector.
        what: Name for messages.
    """

    def __init__(
        self, group: Group, root: int, size: int, dtype: Any, what: str
    ) -> None:
        self._what = what
        self._size, self._dtype = size, np.dtype(dtype)
        single = group.single_node
        inside = group if single else group.inside
        ranks = range(group.size) if single else group.nodes[group.node_number]
        self._is_here = root in ranks
        writer = root if self._is_here else group.nodes[group.node_number][0]
        place = ranks.index(root) if self._is_here else 0
        # On the leader of the publisher's node: what is being sent, to which ranks, and
        # the last step sent to each.
        self._snapshots: list[_Snapshot] = []
        self._sending: set[int] = set()
        self._sent: dict[int, int] = {}
        # On other leaders: the steps that are asked for, and whether a fetch receives.
        self._asked: set[int] = set()
        self._receiving = False
        # Whether no step will be published any more.
        self._closing = False
        with contextlib.ExitStack() as undo:
            copies = DoubleBuffer(inside, place, size, dtype)
            super().__init__(copies, written_here=group.rank == writer)
            undo.callback(self.copies.free)
            self._agent = None if single else self._join(group, root)
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
        source, header = self._agent.leaders[self._source], np.empty(1, np.int64)
        received = comm.Irecv(header, source, tag)
        while not received.Test():
            yield False
        step = int(header[0])
        if step < 0:
            self._asked.discard(~step)
            return
        vector = self.copies.begin(step)
        pieces = pieces_of([slice(0, self._size)], self._dtype.itemsize)
        incoming = Incoming(comm, source, tag, pieces, vector.__getitem__)
        while not incoming.complete:
            if incoming.first() is None:
                yield False
            else:
                incoming.take()
        self.complete(step)
        self._asked = {each for each in self._asked if each > step}

    def _send(self, rank: int, wanted: int) -> Steps:
        """Send the newest parameters to an agent, once they are of a step or newer."""
        while self.version() < wanted and not self._closing:
            yield False
        while rank in self._sending:
            yield False
        sent = self._sent.get(rank, _NONE)
        if sent >= wanted:
            return
        self._sending.add(rank)
        while (snapshot := self._snapshot(wanted)) is None:
            yield False
        # The answer that there is no such step, which is negative, changes nothing.
        self._sent[rank] = max(sent, snapshot.step)
        yield from self._send_snapshot(rank, snapshot)
        snapshot.users -= 1
        self._sending.discard(rank)

    def _send_snapshot(self, rank: int, snapshot: _Snapshot) -> Steps:
        assert self._agent is not None
        comm, tag = self._agent.comm, self._agent.tag(self._number)
        header = np.array([snapshot.step])
        request = comm.Isend(header, rank, tag)
        if snapshot.step >= 0:
            pieces = pieces_of([slice(0, self._size)], self._dtype.itemsize)
            yield from send_pieces(comm, rank, tag, pieces, snapshot.vector.__getitem__)
        while not request.Test():
            yield False

    def _snapshot(self, wanted: int) -> _Snapshot | None:
        """Return a copy of the newest parameters, for one more user.

        A node that is slow must delay neither updates nor other nodes.

        Returns:
            None if an update overwrote the parameters. If there will never be what is
            wanted, no parameters, and its complement as their step.
        """
        newest = self.version()
        if newest < wanted:
            return _Snapshot(np.empty(0, self._dtype), ~wanted)
        for found in self._snapshots:
            if found.step == newest:
                found.users += 1
                return found
        snapshot = next((each for each in self._snapshots if not each.users), None)
        if snapshot is None:
            snapshot = _Snapshot(np.empty(self._size, self._dtype))
            self._snapshots.append(snapshot)
        vector = snapshot.vector
        step = self.copies.try_read(lambda flat: np.copyto(vector, flat))
        snapshot.step = _NONE if step is None else step
        snapshot.users = 0 if step is None else 1
        return None if step is None else snapshot

    def free(self) -> None:
        """Free the memory, after the last step is published. Collective."""
        self._closing = True
        if self._agent is not None:
            self._agent.remove(self._number, f"{self._what}: free")
            self._words.free()
        self._snapshots.clear()
        self.copies.free()

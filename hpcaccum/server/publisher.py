"""Parameters that servers publish and all ranks read from memory of their node.

Each server publishes its part; a single server has all. Every node has a copy of all
parts, in a `DoubleBuffer`. The ranks on the node of a single server read what it
publishes; other nodes get it from a `ParameterAgent`. A node asks for a newer version
when one of its ranks waits for it, unless the root knows that.

What is published, sent and asked for are versions: a step has another one for each time
that values are assigned between two updates.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from hpcaccum.deadline import Wake
from hpcaccum.errors import format_ranks
from hpcaccum.nodes import Agent, is_short, words_of
from hpcaccum.server.double_buffer import (
    DoubleBuffer,
    step_of,
    writer_inside,
)
from hpcaccum.server.parameter_agent import ParameterAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.server.parameter_copies import Copier

# For so many seconds after a step has come, a rank does not ask for a newer one: the
# answer may be as old.
_RECENT = 1e-3
# Words of the root: the newest version; of several servers, the last of each, for
# messages of all ranks.
_NEWEST, _MADE = 0, 1


class Change:
    """Changes of memory of a node, which one thread makes and all its ranks wait for.

    Args:
        made_here: Whether a thread of this rank makes them. Its other threads then
            block: if they polled, they would take the interpreter from it.
    """

    def __init__(self, *, made_here: bool) -> None:
        self._made_here = made_here
        # What wakes each call of `wait` that blocks.
        self._blocked: list[Wake] = []

    def announce(self) -> None:
        """Wake the threads of this rank, after a change."""
        for each in list(self._blocked):
            each.wake()

    def wait(
        self,
        fact: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until something is true."""
        if self._made_here:
            self._block(fact, deadline, missing)
            return

        def found() -> bool | None:
            if fact():
                return True
            if meanwhile is not None:
                meanwhile()
            return None

        deadline.wait(found, missing)

    def _block(
        self, fact: Callable[[], bool], deadline: Deadline, missing: Callable[[], str]
    ) -> None:
        announced = Wake()
        self._blocked.append(announced)
        try:
            deadline.block(announced.until(fact), missing)
        finally:
            self._blocked.remove(announced)


class Publisher:
    """The parameters of one or several servers, a flat vector. Collective.

    Each of the ``servers``, the root first, publishes the part of the same number. The
    ``copier`` copies between vectors and variables.

    Attributes:
        nodes: Of the servers.
        number: Of the server of this node, if there is one.
        copies: Where the ranks of this node read.
        own: Where the server of this node publishes its part, if there is one.
        agent: Of this node; None if there is one node.
        changed: Announced by this thread, after what others of this rank wait for.
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
        self._copier, self.nodes = copier, [group.node_of[each] for each in servers]
        here = group.node_number
        self.number = self.nodes.index(here) if here in self.nodes else None
        # Whether the ranks of this node read what the single server writes.
        self._is_here = not several and self.number is not None
        inside, writer = writer_inside(group, root)
        if several:
            writer = 0
        self.changed = Change(made_here=inside.rank == writer)
        # When a step has come for which this rank waited.
        self._came = -math.inf
        self.own: DoubleBuffer | None = None
        self.agent: ParameterAgent | None = None
        with contextlib.ExitStack() as undo:
            self.copies = DoubleBuffer(inside, writer, copier.size, copier.dtype)
            undo.callback(self.copies.free)
            if self._is_here:
                self.own = self.copies
            elif self.number is not None:
                # Collective on the node, so all of its ranks allocate or none.
                part = parts[self.number]
                server = group.node_ranks.index(servers[self.number])
                size = part.stop - part.start
                self.own = DoubleBuffer(inside, server, size, copier.dtype)
                undo.callback(self.own.free)
            if not group.single_node:
                self._join(group, parts, undo)
            undo.pop_all()

    def _join(
        self, group: Group, parts: Sequence[slice], undo: contextlib.ExitStack
    ) -> None:
        count = len(self._servers) if len(self._servers) > 1 else 0
        self._count = _MADE + count
        self._words = words_of(group, self._servers[0], self._count, self._what)
        undo.callback(self._words.free)
        self._agent = Agent.of(group)
        self.agent = ParameterAgent(
            self._agent,
            self.nodes,
            parts,
            self._copier,
            self.copies,
            self.own,
            self.complete_here,
        )

    # Every rank

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds copies, and what it publishes."""
        nbytes = self.copies.window_bytes
        if self.own is not None and self.own is not self.copies:
            nbytes += self.own.window_bytes
        return nbytes

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

        Args:
            version: The version.
            deadline: Of the wait.
            missing: Returns what it waits for if the version is not published.
            meanwhile: Called again and again.
            comes: Whether the root knows that this node waits for it.
        """
        if not comes:
            self.fetch(version)
        self.changed.wait(
            self.copies.has(version),
            deadline,
            lambda: self.under_way(version) or missing(),
            meanwhile,
        )
        self._came = time.monotonic()

    def fetch(self, version: int) -> None:
        """Have a version sent to this node, unless its ranks read it where it is."""
        if self.agent is not None and not self._is_here:
            self.agent.tell([self._agent.node], "fetch", version)

    def under_way(self, version: int) -> str | None:
        """Return what moves or makes a version; None if it is not published."""
        if self._is_here:
            return None
        newest, *made = self._words.read_range(_NEWEST, self._count)
        if newest < version:
            return None
        agent, step = self._agent, step_of(version)
        behind = [n for n, each in enumerate(made) if each < version]
        if not behind:
            sources, here = agent.describe(self.nodes), agent.describe([agent.node])
            return f"step {step}, on its way from {sources} to {here}"
        ranks = format_ranks([self._servers[n] for n in behind])
        nodes = agent.describe(self.nodes[n] for n in behind)
        return f"update {step} by {ranks}, servers of {nodes}"

    def read(self, use: Callable[[Array], None], deadline: Deadline) -> int:
        """Let ``use`` copy what this node has; see `DoubleBuffer.read`."""
        return step_of(self.copies.read(use, deadline))

    def complete_here(self, version: int) -> None:
        """Let the ranks of this node read what `copies.begin` returned memory for."""
        self.copies.complete(version)
        self.changed.announce()

    # A server

    def begin(self, version: int) -> Array:
        """Return the memory for a version of its part, larger than all before."""
        assert self.own is not None
        return self.own.begin(version)

    def complete(self, version: int, awaited_by: Iterable[int] = ()) -> None:
        """Publish what was written since `begin`.

        Nodes of the ranks that wait for it get it from a single server unasked.
        """
        if not self._is_here:
            # Those who wait for it are named in the order to make it.
            assert self.own is not None
            self.own.complete(version)
            return
        if self.agent is None:
            self.complete_here(version)
            return
        # Before any rank can have this version, `newest_version` must return it.
        self.announce(version)
        nodes = {self._node_of[rank] for rank in awaited_by} - set(self.nodes)
        pushed = self._push(version, nodes)
        self.complete_here(version)
        self.agent.tell(self.nodes, "published", version, nodes, pushed)

    def _push(self, version: int, nodes: set[int]) -> bool:
        """Send a version to nodes, if it is short; return whether it is.

        The agent would have to be woken, and to wait for the interpreter.
        """
        assert self.agent is not None
        flat = self.copies.copy(self.copies.writing)
        if not (self._copier.whole and is_short(flat.nbytes)):
            return False
        for node in nodes:
            take = "take", 0, version, flat.nbytes, flat.tobytes()
            self.agent.tell([node], *take)
        return True

    def announce(self, version: int) -> None:
        """Set the newest version; the root only."""
        self._words.write(_NEWEST, version)

    # The root's node, of several servers

    def note_made(self, server: int, version: int) -> None:
        """Note the newest version of a server."""
        self._words.write(_MADE + server, version)
        self.changed.announce()

    def made(self) -> int:
        """Return the version that all servers have made."""
        return min(self._words.read_range(_MADE, len(self._servers)))

    def free(self) -> None:
        """Free the memory, after the last version is published. Collective."""
        if self.agent is not None:
            self.agent.free(f"{self._what}: free")
            self._words.free()
        if self.own is not None and self.own is not self.copies:
            self.own.free()
        self.copies.free()

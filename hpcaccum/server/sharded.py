"""Parameters of which several ranks, the servers, update a part each.

The root decides which gradients make each update, and orders it when all servers have
carried out the last one. How orders, gradients and parameters travel: see
`order_agent`.

One server alone needs no orders: it updates, and its agent sends the newest parameters
to each node that asks. That is `Parameters`, with fewer messages.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.errors import format_ranks
from hpcaccum.mpi import AtomicWords, complete, memory_of_rank
from hpcaccum.nodes import Agent, words_of
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.node_copy import NodeCopy, step_of, version_of
from hpcaccum.server.order_agent import OrderAgent
from hpcaccum.server.order_words import (
    ANSWERS,
    BUFFER,
    DETAIL,
    DONE,
    KIND,
    MADE,
    NEWEST,
    ORDER,
    PARAMETERS,
    QUESTIONS,
)
from hpcaccum.server.questions import Questions
from hpcaccum.server.shard import Server, Shard, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hpcaccum.accumulator import Batch
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import NodeParts
    from hpcaccum.server.wire_format import WireFormat


class ShardedParameters(NodeCopy):
    """The parameters of several servers, a flat vector with a step. Collective.

    Each server has a part of it. The step increases.

    Args:
        group: The ranks, on several nodes.
        servers: Those that hold the parts, each on another node. The first is the root,
            which gives the orders.
        wire: How variables lie in the vector.
        initial: Name to array; the servers begin with the root's.
        parts: Where gradients lie.
        elementwise: See `Shard`.
        most: How many steps may be ordered and not made, at most.
        what: Name for messages.

    Attributes:
        shards: Of each server.
        server: That of this node, if it has one.
        buffers: The most steps that may be ordered and not yet made. A server has
            memory for the gradients of each, but in all for no more than a whole one.
        ordered: The step that was ordered last; on the root.
        questions: Of the root to the servers.
    """

    def __init__(
        self,
        group: Group,
        servers: Sequence[int],
        wire: WireFormat,
        initial: Mapping[str, Array],
        parts: NodeParts,
        what: str,
        *,
        elementwise: bool,
        most: int,
    ) -> None:
        layout, inside = wire.parameters, group.inside
        self._servers, self._what = servers, what
        self._names = list(wire.parameters)
        self.shards = [
            Shard(wire, part, elementwise=elementwise)
            for part in cut(layout, len(servers), elementwise=elementwise)
        ]
        longest = max(each.part.stop - each.part.start for each in self.shards)
        self.buffers = min(most, max(1, round(layout.size / max(1, longest))))
        self.ordered = -1
        self._nodes = [group.node_of[server] for server in servers]
        with contextlib.ExitStack() as undo:
            copies = DoubleBuffer(inside, 0, layout.size, layout.dtype)
            super().__init__(copies, written_here=inside.rank == 0)
            undo.callback(self.copies.free)
            self._words = AtomicWords(inside, 0, MADE + len(servers))
            undo.callback(self._words.free)
            self._steps = words_of(group, servers[0], 1 + len(servers))
            undo.callback(self._steps.free)
            # Collective on the node, so all of its ranks allocate or none.
            here = group.node_number in self._nodes
            self.server = self._allocate(group) if here else None
            self._agent = Agent.of(group)
            undo.pop_all()
        self._service = OrderAgent(
            self._agent,
            self._nodes,
            self.shards,
            self.server,
            parts,
            self,
            self._words,
            self._steps,
        )
        tags = self._service.tag(QUESTIONS), self._service.tag(ANSWERS)
        ask = functools.partial(self._request, "ask")
        self.questions = Questions(self._agent.comm, servers, tags, ask)
        self._scatter(wire, initial)
        # No agent sends a part before its server has it.
        group.allgather(None, f"{what}: servers")

    def _allocate(self, group: Group) -> Server:
        """Make the memory of the server of this node."""
        number = self._nodes.index(group.node_number)
        shard, dtype = self.shards[number], self.copies.dtype
        rank = group.node_ranks.index(self._servers[number])
        length = shard.part.stop - shard.part.start
        nbytes = (length + self.buffers * shard.size) * dtype.itemsize
        memory = memory_of_rank(group.inside, rank, nbytes).view(dtype)
        gradients = memory[length:].reshape(self.buffers, shard.size)
        return Server(number, shard, memory[:length], gradients)

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds copies, and what it serves."""
        nbytes = super().window_bytes
        if self.server is not None and self._agent.comm.rank in self._servers:
            nbytes += self.server.part.nbytes + self.server.gradients.nbytes
        return nbytes

    def _scatter(self, wire: WireFormat, initial: Mapping[str, Array]) -> None:
        """Send each server its part of the root's parameters. Collective."""
        comm, tag = self._agent.comm, self._service.tag(PARAMETERS)
        begun = []
        if comm.rank == self._servers[0]:
            flat = np.empty(self.copies.size, self.copies.dtype)
            arrays = {name: to_host(array) for name, array in initial.items()}
            wire.write_parameters(arrays, flat)
            for rank, shard in zip(self._servers, self.shards, strict=True):
                begun.append(comm.Isend(flat[shard.part], rank, tag))
        if comm.rank in self._servers:
            assert self.server is not None
            begun.append(comm.Irecv(self.server.part, self._servers[0], tag))
        self._end_start(begun)

    def divide(
        self, arrays: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]] | None:
        """Send each server its part of arrays of the root; return it. Collective."""
        # There are no questions yet; parameters may be on their way.
        comm, tag = self._agent.comm, self._service.tag(QUESTIONS)
        mine: list[Any] = []

        def exchange() -> Iterator[Any]:
            """Yield the requests of the root, and receive what a server gets."""
            if comm.rank == self._servers[0]:
                for rank, shard in zip(self._servers, self.shards, strict=True):
                    for name in self._names:
                        yield comm.isend(shard.pieces(name, arrays[name]), rank, tag)
            if comm.rank in self._servers:
                mine.extend(self._message(tag) for _ in self._names)

        self._end_start(exchange())
        if self.server is None or not mine:
            return None
        names = self.server.shard.names
        return {n: m for n, m in zip(self._names, mine, strict=True) if n in names}

    def _message(self, tag: int) -> Any:
        """Receive a message of the root at the start."""
        comm, root = self._agent.comm, self._servers[0]
        deadline = Deadline(None, f"{self._what}: start of servers")
        found = deadline.wait(
            lambda: comm.improbe(root, tag), lambda: f"a message of host rank {root}"
        )
        return found.recv()

    def _end_start(self, requests: Iterable[Any]) -> None:
        """Wait until what servers get from the root at the start has arrived."""
        complete(
            requests,
            Deadline(None, f"{self._what}: start of servers"),
            lambda: f"host rank {self._servers[0]} and the servers",
        )

    # The root

    def newest_version(self) -> int:
        """Return what the root has ordered last; a round trip."""
        return self._steps.read(NEWEST)

    def begin(self, step: int) -> None:
        """Set the step of the parameters that the servers begin with; the root only."""
        version = version_of(step)
        self._steps.store(NEWEST, [version] * (1 + len(self._servers)))
        self._words.store(MADE, [version] * len(self._servers))
        self.ordered = step
        self._request("begin", version)

    def order(
        self, step: int, batch: Batch, rate: float | None, *, awaited: bool
    ) -> None:
        """Order a step of a batch of gradients; the root only.

        Only as many steps as there are buffers may be ordered and not made.
        """
        # Before any rank can have this version, `newest_version` must return it.
        self._steps.write(NEWEST, version_of(step))
        places, version = list(batch.places), version_of(step)
        self._request("order", version, places, batch.divisor, rate, awaited)
        self.ordered = step

    def order_again(self) -> int:
        """Order a version of the newest step without an update; the root only."""
        version = self.newest_version() + 1
        self._steps.write(NEWEST, version)
        self._request("order", version, [], 1, None, False)
        return version

    def wait_for_servers(
        self,
        version: int,
        deadline: Deadline,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until all servers have made a version; the root only."""

        def made() -> bool:
            meanwhile()
            return self._made() >= version

        self.changed.wait(
            made, deadline, lambda: self._under_way(version) or "its own agent"
        )

    def made(self) -> int:
        """Return the step that all servers have made; on the root's node only."""
        return step_of(self._made())

    def _made(self) -> int:
        return min(self._words.read_range(MADE, len(self._servers)))

    def _request(self, kind: str, *request: Any) -> None:
        """Send a request to the agent of this node."""
        self._agent.request(self._agent.node, self._service.number, kind, *request)

    def end(self) -> None:
        """End the loops of all servers, after the last order; the root only."""
        self._request("end")

    # A server

    def next_order(self, last: int, deadline: Deadline) -> tuple[int, int, int, int]:
        """Wait for the next order to the server of this node.

        Returns:
            Its number, what it asks for, and what belongs to that.
        """
        read = self._words.read
        self.changed.wait(lambda: read(ORDER) > last, deadline, lambda: "an order")
        return read(ORDER), read(KIND), read(DETAIL), read(BUFFER)

    def done(self, number: int) -> None:
        """Say that an order has been carried out."""
        self._words.write(DONE, number)
        self._agent.wake()

    # Every rank

    def _ask_for(self, version: int) -> None:
        if self.copies.version() < version:
            self._request("fetch", version)

    def _under_way(self, version: int) -> str | None:
        newest, *made = self._steps.read_range(NEWEST, 1 + len(self._servers))
        if newest < version:
            return None
        agent, step = self._agent, step_of(version)
        behind = [n for n, each in enumerate(made) if each < version]
        if not behind:
            sources, here = agent.describe(self._nodes), agent.describe([agent.node])
            return f"step {step}, on its way from {sources} to {here}"
        ranks = format_ranks([self._servers[n] for n in behind])
        nodes = agent.describe(self._nodes[n] for n in behind)
        return f"update {step} by {ranks}, servers of {nodes}"

    def free(self) -> None:
        """Free the memory, after the last update. Collective."""
        # The last question has made all ranks receive what was sent before it.
        Deadline(None, f"{self._what}: free").wait(
            lambda: self.questions.are_received() or None,
            lambda: "servers to receive questions, and the host answers",
        )
        self._agent.remove(self._service.number, f"{self._what}: free")
        self._words.free()
        self._steps.free()
        self.copies.free()

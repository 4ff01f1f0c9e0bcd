"""The agents of a center in parts: they carry orders to servers, and gradients.

The root decides which gradients make each update, and its agent sends an order to the
agents of all nodes concerned. The agent of a node adds the gradients of its ranks and
sends each server its part of the sum. The agent of a server adds these sums, and the
server updates its part. An order also lists the nodes that wait for the new parameters,
and every server sends them its part. Servers carry out orders one after the other, so
all parts that a node gets are of one version.

The root may order a few steps before the first of them is made. Their gradients then
travel at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.nodes import Service
from hpcaccum.server.double_buffer import step_of, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import AtomicWords
    from hpcaccum.nodes import Agent, NodeParts, Place, Steps
    from hpcaccum.server.part import Part
    from hpcaccum.server.publisher import Publisher

# Words of a node with a server: the number of its newest order, of the last that it has
# carried out, what it asks for, two numbers that belong to that, the version that it
# makes, and which gradients.
ORDER, DONE, KIND, DETAIL, FACTOR, VERSION, BUFFER, WORDS = range(8)
# What an order asks a server for: an update, with a learning rate and the factor of the
# gradients as bits; an answer, with the number of the question; to take the values that
# were assigned.
UPDATE, NO_UPDATE, ANSWER, END, ASSIGN = range(5)
# Channels of messages: gradients, first parameters, questions to servers, answers.
GRADIENTS, PARAMETERS, QUESTIONS, ANSWERS = range(4)


class OrderAgent(Service):
    """The service of one node's agent for `Orders`. Collective.

    Args:
        agent, parts, publisher: Of this node; of each server; of the parameters.
        memory: For gradients of the server of this node, if it has one, shape (buffers,
            elements). Those of a step have the place of its number modulo ``buffers``.
        gradients: Those of all ranks.
        words: Of this node, as above.
    """

    def __init__(
        self,
        agent: Agent,
        parts: Sequence[Part],
        memory: Array | None,
        gradients: NodeParts,
        publisher: Publisher,
        words: AtomicWords,
    ) -> None:
        assert publisher.agent is not None
        self._nodes, self._parts = publisher.nodes, parts
        self._memory, self._gradients, self._words = memory, gradients, words
        self._publisher, self._parameters = publisher, publisher.agent
        # To and from each node, so that gradients of two steps do not mix.
        self._giving, self._collecting = self.queues(), self.queues()
        # The number of the last order that the server of this node has got, and the
        # versions whose gradients it has.
        self._given = 0
        self._collected: set[int] = set()
        agent.add(self)

    # On the root's node

    def _do_begin(self, version: int) -> None:
        """Have the first version sent to the nodes that have asked for it."""
        self._parameters.send_promised(self._parameters.promise(version))

    def _do_order(
        self,
        version: int,
        places: list[Place],
        divisor: float,
        numbers: tuple[int, int],
        awaited: bool,
    ) -> None:
        """Send the order for a version to all nodes concerned."""
        givers = self._gradients.by_node(places)
        # Nodes that have given gradients need not ask.
        ready = self._parameters.promise(version, givers if awaited else ())
        order = version, places, divisor, numbers, ready
        self.tell({*givers, *ready, *self._nodes}, "step", *order)

    def _do_made(self, server: int, version: int) -> None:
        """Note that a server has made a version."""
        self._publisher.note_made(server, version)

    def _do_all_obey(self, *order: int) -> None:
        """Give all servers an order of another kind, after all earlier ones."""
        self.tell(self._nodes, "obey", *order)

    # On a node with gradients, or a server

    def _do_step(
        self,
        version: int,
        places: list[Place],
        divisor: float,
        numbers: tuple[int, int],
        ready: list[int],
    ) -> None:
        """Give gradients, and make the version if this node has a server."""
        by_node = self._gradients.by_node(places)
        if here := by_node.get(self.agent.node):
            self._give(here)
        if self._memory is not None:
            if places:
                # If there are several nodes, no other step has been ordered.
                collect = self._collect(version, places, divisor)
                self._collecting[next(iter(by_node))].add(collect)
            steps = self._make(version, bool(places), numbers, ready)
            self._parameters.turns.add(steps)
        if self.agent.node in ready:
            self._parameters.expect(version)

    def _give(self, places: list[Place]) -> None:
        """Send each server its part of the sum of this node."""
        ranges = {n: p.ranges for n, p in zip(self._nodes, self._parts, strict=True)}
        for node in self.agent.in_turn(self._nodes):
            if node != self.agent.node:
                steps = self._gradients.sending(
                    self.agent.leaders[node],
                    self.tag(GRADIENTS),
                    places,
                    self._publisher.copies.dtype,
                    ranges[node],
                )
                self._giving[node].add(steps)

    def _collect(self, version: int, places: list[Place], divisor: float) -> Steps:
        """Receive the gradients of a version."""
        assert self._memory is not None
        assert self._publisher.number is not None
        yield from self._gradients.collecting(
            self.tag(GRADIENTS),
            places,
            self._parts[self._publisher.number].ranges,
            divisor,
            self._memory[self._buffer(version)],
        )
        self._collected.add(version)

    def _buffer(self, version: int) -> int:
        assert self._memory is not None
        return step_of(version) % len(self._memory)

    # On a server's node

    def _make(
        self, version: int, given: bool, numbers: tuple[int, int], nodes: list[int]
    ) -> Steps:
        """Have the server make a version; send it to nodes."""
        while given and version not in self._collected:
            yield False
        self._collected.discard(version)
        kind = UPDATE if given else NO_UPDATE
        if version != version_of(step_of(version)):
            kind = ASSIGN
        yield from self._obey(kind, *numbers, version, self._buffer(version))
        yield from self._parameters.sending(version, nodes)
        self.tell(self._nodes[:1], "made", self._publisher.number, version)

    def _do_obey(self, kind: int, detail: int = 0) -> None:
        """Give the server of this node such an order."""
        self._parameters.turns.add(self._obey(kind, detail, 0, 0, 0))

    def _obey(self, kind: int, *details: int) -> Iterator[bool]:
        """Give the server of this node an order; wait until it is carried out."""
        self._given += 1
        self._words.store(KIND, [kind, *details])
        self._words.write(ORDER, self._given)
        self._publisher.changed.announce()
        done = self._words.watch(DONE)
        while done() < self._given:
            yield False
        # What the server has changed can be read from now on.
        self._words.sync()

    def free(self, what: str) -> None:
        """End the service. Collective."""
        self.agent.remove(self.number, what)
        self._memory = None

"""Orders of the root to several servers, and how they and gradients travel.

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

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.errors import EverybodyLeftError
from hpcaccum.mpi import AtomicWords, complete, memory_of_rank, number_of
from hpcaccum.nodes import Agent, Service
from hpcaccum.server.double_buffer import step_of, version_of
from hpcaccum.server.part import Order, OwnPart
from hpcaccum.server.questions import Questions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.nodes import NodeParts, Place, Steps
    from hpcaccum.server.part import Part
    from hpcaccum.server.publisher import Publisher
    from hpcaccum.server.wire_format import WireFormat

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


class Orders(Service):
    """Where the loop of each of several servers gets its updates. Collective.

    They begin with the ``initial`` arrays of the root, and add ``gradients`` of all
    ranks. At most ``most`` steps may be ordered and not made. For the other arguments
    see `ParameterServer`.

    Attributes:
        own: The part of this rank, if it is a server.
        buffers: The most steps that may be ordered and not yet made. A server has
            memory for the gradients of each, but in all for no more than a whole one.
        questions: Of the root to the servers.
        answer: Called with a question of the root; returns the answer.
        assign: Called with a version that has the values which were kept.
    """

    adds = False

    def __init__(
        self,
        group: Group,
        servers: Sequence[int],
        wire: WireFormat,
        initial: Mapping[str, Array],
        parts: Sequence[Part],
        gradients: NodeParts,
        publisher: Publisher,
        what: str,
        *,
        most: int,
    ) -> None:
        self._servers, self._parts, self._what = servers, parts, what
        self._names, self.publisher = list(wire.parameters), publisher
        longest = max(each.part.stop - each.part.start for each in parts)
        self.buffers = min(most, max(1, round(wire.parameters.size / max(1, longest))))
        self.answer: Callable[[Any], Any] = lambda _: None
        self.assign: Callable[[int], object] = lambda _: None
        # On a server: the last order that was carried out, and whether it ended all.
        self._done, self._ended = 0, False
        # What agents use: queues to and from each node, so that gradients of two steps
        # do not mix; the number of the last order that the server of this node has got,
        # and the versions whose gradients it has.
        assert publisher.agent is not None
        self._parameters, self._nodes = publisher.agent, publisher.nodes
        self._gradients = gradients
        self._giving, self._collecting = self.queues(), self.queues()
        self._given = 0
        self._collected: set[int] = set()
        with contextlib.ExitStack() as undo:
            self._words = AtomicWords(group.inside, 0, WORDS)
            undo.callback(self._words.free)
            # For gradients of the server of this node, if it has one, shape (buffers,
            # elements). Those of a step have the place of its number modulo `buffers`.
            self._memory = self._allocate(group, publisher.copies.dtype)
            Agent.of(group).add(self)
            undo.pop_all()
        tags = self.tag(QUESTIONS), self.tag(ANSWERS)
        ask = functools.partial(self.request, "all_obey", ANSWER)
        self.questions = Questions(self.agent.comm, servers, tags, ask)
        self.own: OwnPart | None = None
        first = self._scatter(wire, initial)
        if first is not None:
            assert self._memory is not None
            assert publisher.own is not None
            part = parts[servers.index(group.rank)]
            self.own = OwnPart(part, publisher.own, self._memory, first)
        # No order comes before its server is there.
        group.allgather(None, f"{what}: servers")

    def _allocate(self, group: Group, dtype: Any) -> Array | None:
        """Make the memory for gradients of the server of this node, if it has one."""
        number, self.window_bytes = self.publisher.number, 0
        if number is None:
            return None
        server = self._servers[number]
        size = sum(each.stop - each.start for each in self._parts[number].ranges)
        nbytes = self.buffers * size * dtype.itemsize
        if server == group.rank:
            self.window_bytes = nbytes
        rank = group.node_ranks.index(server)
        memory: Array = memory_of_rank(group.inside, rank, nbytes).view(dtype)
        return memory.reshape(self.buffers, size)

    def _scatter(self, wire: WireFormat, initial: Mapping[str, Array]) -> Array | None:
        """Send each server its part of the root's parameters; return it. Collective."""
        comm, tag = self.agent.comm, self.tag(PARAMETERS)
        begun, mine = [], None
        dtype = wire.parameters.dtype
        if comm.rank == self._servers[0]:
            flat = np.empty(wire.parameters.size, dtype)
            arrays = {name: to_host(array) for name, array in initial.items()}
            wire.write_parameters(arrays, flat)
            for rank, each in zip(self._servers, self._parts, strict=True):
                begun.append(comm.Isend(flat[each.part], rank, tag))
        if comm.rank in self._servers:
            part = self._parts[self._servers.index(comm.rank)].part
            mine = np.empty(part.stop - part.start, dtype)
            begun.append(comm.Irecv(mine, self._servers[0], tag))
        complete(begun, self._start, self._starting)
        return mine

    def divide(
        self, arrays: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]] | None:
        """Send each server its part of arrays of the root; return it. Collective."""
        # There are no questions yet; parameters may be on their way.
        comm, tag = self.agent.comm, self.tag(QUESTIONS)
        mine: list[Any] = []

        def exchange() -> Iterator[Any]:
            """Yield the requests of the root, and receive what a server gets."""
            if comm.rank == self._servers[0]:
                for rank, each in zip(self._servers, self._parts, strict=True):
                    for name in self._names:
                        yield comm.isend(each.pieces(name, arrays[name]), rank, tag)
            if comm.rank in self._servers:
                for _ in self._names:
                    found = self._start.wait(
                        lambda: comm.improbe(self._servers[0], tag), self._starting
                    )
                    mine.append(found.recv())

        complete(exchange(), self._start, self._starting)
        if self.own is None:
            return None
        names = self.own.arrays
        return {n: m for n, m in zip(self._names, mine, strict=True) if n in names}

    @property
    def _start(self) -> Deadline:
        return Deadline(None, f"{self._what}: start of servers")

    def _starting(self) -> str:
        return f"host rank {self._servers[0]} and the servers"

    def request(self, kind: str, *request: Any) -> None:
        """Send a request to the agent of this node."""
        self.tell([self.agent.node], kind, *request)

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
        self.publisher.note_made(server, version)

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
                    self.publisher.copies.dtype,
                    ranges[node],
                )
                self._giving[node].add(steps)

    def _collect(self, version: int, places: list[Place], divisor: float) -> Steps:
        """Receive the gradients of a version."""
        assert self._memory is not None
        assert self.publisher.number is not None
        yield from self._gradients.collecting(
            self.tag(GRADIENTS),
            places,
            self._parts[self.publisher.number].ranges,
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
        self.tell(self._nodes[:1], "made", self.publisher.number, version)

    def _do_obey(self, kind: int, detail: int = 0) -> None:
        """Give the server of this node such an order."""
        self._parameters.turns.add(self._obey(kind, detail, 0, 0, 0))

    def _obey(self, kind: int, *details: int) -> Iterator[bool]:
        """Give the server of this node an order; wait until it is carried out."""
        self._given += 1
        self._words.store(KIND, [kind, *details])
        self._words.write(ORDER, self._given)
        self.publisher.changed.announce()
        done = self._words.watch(DONE)
        while done() < self._given:
            yield False
        # What the server has changed can be read from now on.
        self._words.sync()

    # A server

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Order]:
        """Wait for the next update; carry out orders of other kinds before it."""
        while not self._ended:
            number, order = self._next_order(deadline)
            kind, detail, factor, version, buffer = order
            if kind == ANSWER:
                limit = Deadline(None, f"{self._what}: server")
                self.questions.answer(self.answer, detail, limit)
            elif kind == ASSIGN:
                self.assign(version)
            elif kind != END:
                rate = number_of(detail)
                yield Order(
                    step_of(version) - 1,
                    buffer if kind == UPDATE else None,
                    number_of(factor),
                    None if math.isnan(rate) else rate,
                )
            self._ended = kind == END
            self._done = number
            self._words.write(DONE, number)
            self.agent.wake()
            if kind not in (ANSWER, ASSIGN, END):
                return
        raise EverybodyLeftError(f"{self._what}: the host has ended all servers")

    def _next_order(self, deadline: Deadline) -> tuple[int, list[int]]:
        """Return the number of the next order, and its words from KIND on."""
        read, last = self._words.read, self._done
        self.publisher.changed.wait(
            lambda: read(ORDER) > last, deadline, lambda: "an order"
        )
        return read(ORDER), self._words.read_range(KIND, BUFFER + 1 - KIND)

    def awaited(self, step: int) -> str:
        """Return what the update of a step lacks."""
        return f"an order of host rank {self._servers[0]}"

    def come_back(self) -> None:
        """Let the loop of this server, which the root has ended, go on."""
        self._ended = False

    def free(self) -> None:
        """Free the memory, after the last update. Collective."""
        # The last question has made all ranks receive what was sent before it.
        Deadline(None, f"{self._what}: free").wait(
            lambda: self.questions.are_received() or None,
            lambda: "servers to receive questions, and the host answers",
        )
        self.agent.remove(self.number, f"{self._what}: free")
        self._memory = None
        self._words.free()

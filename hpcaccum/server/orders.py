"""Orders of the root to several servers, and how they and gradients travel.

The second table of docs/architecture.md, "A push and its update, on two nodes", follows
one. Servers carry out orders one after the other, so all parts that a node gets are of
one version. The root may order a few steps before the first of them is made; their
gradients then travel at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.dtypes import Array
from hpcaccum.errors import EverybodyLeftError
from hpcaccum.mpi import (
    AtomicWords,
    Group,
    begun,
    complete,
    is_complete,
    memory_of_rank,
    receive,
)
from hpcaccum.nodes import Agent, Place, Service, Steps
from hpcaccum.server.options import Inbox, ServerSetup
from hpcaccum.server.part import Order, Part
from hpcaccum.server.publisher import Publisher

# Words of a node with a server: how many orders its agent has given it, and how many of
# them it has carried out. The last order is in memory of the node, pickled, at most so
# many bytes.
_GIVEN, _DONE = range(2)
_ROOM = 1024
# What an order asks a server for: an update; the answer to a question, which is in a
# message as it may be long; to take the values that were assigned, as a version.
UPDATE, ANSWER, END, ASSIGN = range(4)
# Updates of single gradients that several servers have at a time. Gradients of several
# nodes use more links: on 4 nodes, those of 16 MiB took 0.65 of the time.
AT_A_TIME = 4
# Channels of messages: gradients, questions, answers, what servers begin with.
_GRADIENTS, _QUESTIONS, _ANSWERS, _START = range(4)


class Orders(Service):
    """Where the loop of each of several servers gets its updates. Collective.

    Servers begin with parts of the root's arrays, and add the gradients of the inbox.

    Attributes:
        own, first: The part of this rank, and its arrays, if it is a server.
        buffers: The most steps that may be ordered and not yet made. A server has
            memory for the gradients of each, but in all for no more than a whole one.
        answer: Called with a question of the root; returns the answer.
        assign: Called with a version that has the values which were kept.
    """

    adds = False
    own: Part

    def __init__(
        self,
        setup: ServerSetup,
        parts: Sequence[Part],
        inbox: Inbox,
        publisher: Publisher,
    ) -> None:
        group, servers = setup.group, setup.options.ranks
        self._servers, self._parts, self._what = servers, parts, setup.what
        longest = max(each.part.stop - each.part.start for each in parts)
        fit = max(1, round(parts[-1].part.stop / max(1, longest)))
        self.buffers = 1 if inbox.adds else min(AT_A_TIME, fit)
        self.answer: Callable[[Any], Any] = lambda _: None
        self.assign: Callable[[int], object] = lambda _: None
        # On the root, by number: the answers to questions that wait for some, by rank.
        # A signal handler may add a question.
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[int, Any]] = {}
        # On a server: whether an order has ended all; the question, with its number,
        # that it has to answer; answers on their way.
        self._ended = False
        self._question: tuple[int, Any] | None = None
        self._sent: list[Any] = []
        # What agents use: queues to and from each node, so that gradients of two steps
        # do not mix; how many orders the server of this node has got, and the versions
        # whose gradients it has.
        self.publisher, self._nodes = publisher, publisher.nodes
        self._gradients = inbox.parts
        # Each server needs another part.
        inbox.parts.sends_short = False
        self._giving, self._collecting = self.queues(), self.queues()
        self._given = 0
        self._collected: set[int] = set()
        # For gradients of the server of this node, if it has one, shape (buffers,
        # elements), and for the order. Gradients of a step have the place of its number
        # modulo `buffers`.
        self._memory, self._order = self._allocate(group, publisher.copies.dtype)
        self._words = AtomicWords(group.inside, 0, 2)
        Agent.of(group).add(self)
        if group.rank in servers:
            self.own = parts[servers.index(group.rank)]
        initial = setup.initial.items() if group.rank == servers[0] else ()
        first = self.divide({name: {"": to_host(array)} for name, array in initial})
        self.first = {name: each[""] for name, each in first.items()}
        # No order comes before its server is there.
        group.allgather(None, f"{setup.what}: servers")

    def _allocate(self, group: Group, dtype: Any) -> tuple[Array, Array]:
        """Make the memory of the server of this node, if it has one."""
        number = self.publisher.server_here
        if number < 0:
            return np.empty((0, 0), dtype), np.empty(0, np.uint8)
        size = sum(each.stop - each.start for each in self._parts[number].ranges)
        nbytes = self.buffers * size * dtype.itemsize
        rank = group.node_ranks.index(self._servers[number])
        memory = memory_of_rank(group.inside, rank, nbytes + _ROOM)
        gradients = memory[:nbytes].view(dtype).reshape(self.buffers, size)
        return gradients, memory[nbytes:]

    def divide(
        self, arrays: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Return this server's part of arrays of the root, if any. Collective."""
        comm, tag, root = self.agent.comm, self.tag(_START), self._servers[0]
        start = Deadline(None, f"{self._what}: start of servers")
        mine: dict[str, dict[str, Any]] = {}

        def starting() -> str:
            return f"host rank {root} and the servers"

        def exchange() -> Iterator[Any]:
            """Yield the requests of the root, and receive what a server gets."""
            if comm.rank == root:
                for rank, part in zip(self._servers, self._parts, strict=True):
                    for name in part.within:
                        yield comm.isend(part.pieces(name, arrays[name]), rank, tag)
            if comm.rank in self._servers:
                for name in self.own.within:
                    found = start.wait(lambda: comm.improbe(root, tag), starting)
                    mine[name] = found.recv()

        complete(exchange(), start, starting)
        return mine

    def request(self, kind: str, *request: Any) -> None:
        """Send a request to the agent of this node."""
        self.tell([self.agent.node], kind, *request)

    # The root

    def ask(self, question: Any, deadline: Deadline) -> list[Any]:
        """Ask all servers between two updates; return their answers."""
        number = next(self._numbers)
        self._answers[number] = {}
        try:
            self.request("all_obey", ANSWER, number, question)
            return [self._wait_for(rank, number, deadline) for rank in self._servers]
        finally:
            del self._answers[number]

    def _wait_for(self, rank: int, number: int, deadline: Deadline) -> Any:
        answers = self._answers[number]

        def look() -> bool | None:
            message = self.agent.comm.improbe(rank, self.tag(_ANSWERS))
            if message is not None:
                answered, answer = message.recv()
                # Not if it was given up.
                if answered in self._answers:
                    self._answers[answered][rank] = answer
            return rank in answers or None

        deadline.wait(look, lambda: f"the answer of server rank {rank}")
        return answers[rank]

    # On the root's node

    def _do_order(self, order: Order, awaited: bool) -> None:
        """Send an order to all nodes concerned."""
        givers = self._gradients.by_node(order.places)
        # Nodes that have given gradients need not ask.
        waiting = givers if awaited else ()
        ready = self.publisher.promises.publish(order.version, waiting)
        self.tell({*givers, *ready, *self._nodes}, "step", order, ready)

    def _do_all_obey(self, *order: Any) -> None:
        """Give all servers an order of another kind, after all earlier ones."""
        self.tell(self._nodes, "obey", *order)

    # On a node with gradients, or a server

    def _do_step(self, order: Order, ready: list[int]) -> None:
        """Give gradients, and make the version if this node has a server."""
        by_node = self._gradients.by_node(order.places)
        if here := by_node.get(self.agent.node):
            self._give(here)
        if self.publisher.server_here >= 0:
            if order.places:
                # If there are several nodes, no other step has been ordered.
                self._collecting[next(iter(by_node))].add(self._collect(order))
            self.publisher.turns.add(self._make(order, ready))
        if self.agent.node in ready:
            self.publisher.expect(order.version)

    def _give(self, places: list[Place]) -> None:
        """Send each server its part of the sum of this node."""
        ranges = {n: p.ranges for n, p in zip(self._nodes, self._parts, strict=True)}
        for node in self.agent.in_turn(self._nodes):
            if node != self.agent.node:
                steps = self._gradients.sending(
                    self.agent.leaders[node],
                    self.tag(_GRADIENTS),
                    places,
                    self.publisher.copies.dtype,
                    ranges[node],
                )
                self._giving[node].add(steps)

    def _collect(self, order: Order) -> Steps:
        yield from self._gradients.collecting(
            self.tag(_GRADIENTS),
            order.places,
            self._parts[self.publisher.server_here].ranges,
            order.divisor,
            self._memory[order.step % len(self._memory)],
        )
        self._collected.add(order.version)

    # On a server's node

    def _make(self, order: Order, nodes: list[int]) -> Steps:
        version, here = order.version, self.publisher.server_here
        while order.places and version not in self._collected:
            yield False
        self._collected.discard(version)
        what = version, bool(order.places), order.factor, order.rate
        yield from self._obey(ASSIGN if order.assigns else UPDATE, *what)
        yield from self.publisher.sending(version, nodes)
        self.publisher.tell(self._nodes[:1], "made", here, version)

    def _do_obey(self, *order: Any) -> None:
        self.publisher.turns.add(self._obey(*order))

    def _obey(self, kind: int, *what: Any) -> Steps:
        """Give the server of this node an order; wait until it is carried out."""
        sent = None
        if kind == ANSWER:
            server, tag = self._servers[self.publisher.server_here], _QUESTIONS
            sent, what = begun(self.agent.comm.isend, what, server, self.tag(tag)), ()
        data = pickle.dumps((kind, *what), -1)
        self._order[: len(data)] = np.frombuffer(data, np.uint8)
        self._given += 1
        self._words.write(_GIVEN, self._given)
        self.publisher.waiting.wake()
        done = self._words.watch(_DONE)
        while done() < self._given or not is_complete(sent):
            yield False
        # What the server has changed can be read from now on.
        self._words.sync()

    # A server

    @contextlib.contextmanager
    def next(self, step: int, deadline: Deadline) -> Iterator[Order]:
        """Wait for the next update; carry out orders of other kinds before it."""
        given, done = self._words.watch(_GIVEN), self._words.watch(_DONE)
        while not self._ended:
            self.publisher.waiting.wait(
                lambda: given() > done(), deadline, lambda: "an order"
            )
            self._words.sync()
            # The same one again if an exception has ended the last call.
            kind, *what = pickle.loads(self._order.data)
            if kind == UPDATE:
                version, has_gradients, factor, rate = what
                order = Order(version, factor=factor, rate=rate)
                mean = self._memory[order.step % len(self._memory)]
                yield order._replace(mean=mean) if has_gradients else order
            elif kind == ANSWER:
                self._answer()
            elif kind == ASSIGN:
                self.assign(what[0])
            self._ended, self._question = kind == END, None
            self._words.write(_DONE, done() + 1)
            self.agent.wake()
            if kind == UPDATE:
                return
        raise EverybodyLeftError(f"{self._what}: the host has ended all servers")

    def _answer(self) -> None:
        """Answer a question; do not wait for the root.

        The root may have given it up: it receives the answer when it asks again.
        """
        comm, root = self.agent.comm, self._servers[0]
        if self._question is None:
            limit, tag = Deadline(None, f"{self._what}: server"), self.tag(_QUESTIONS)
            found = limit.wait(lambda: receive(comm, tag), lambda: "a question")
            self._question = found[1]
        number, question = self._question
        self._are_received()
        answer = number, self.answer(question)
        self._sent.append(comm.isend(answer, root, self.tag(_ANSWERS)))

    def _are_received(self) -> bool:
        """Whether the root has received all answers of this server."""
        self._sent = [each for each in self._sent if not each.Test()]
        return not self._sent

    def awaited(self, step: int) -> str:
        """Return what the update of a step lacks."""
        return f"an order of host rank {self._servers[0]}"

    def come_back(self) -> None:
        """Let the loop of this server, which the root has ended, go on."""
        self._ended = False

    def free(self) -> None:
        """Free the memory, after the last update. Collective."""
        # The last question has made the root receive all answers before it.
        Deadline(None, f"{self._what}: free").wait(
            lambda: self._are_received() or None,
            lambda: f"host rank {self._servers[0]} to receive answers",
        )
        self.agent.remove(self.number, f"{self._what}: free")
        # The agent may not have seen yet that its server has carried out the last one.
        turns = self.publisher.turns
        Deadline(math.inf, f"{self._what}: free").wait(
            lambda: not turns.running or None, lambda: "its own agent"
        )
        self._memory, self._order = np.empty((0, 0)), np.empty(0, np.uint8)
        self.first = {}
        self._words.free()

"""One agent per node, which moves gradients and parameters between nodes.

An agent is a thread of the first rank of its node, the leader. Any rank sends it
requests, and agents send data to each other by ordinary messages. So both ends of a
transfer have a thread that is in MPI, while the ranks compute.

A `Service` handles the requests of one object. A handler does not block: it is a
generator that yields while it waits, and the agent runs all of them in turn.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpcaccum.deadline import EAGER, Deadline, Waiting, Wake
from hpcaccum.dtypes import quiet
from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError, plural
from hpcaccum.mpi import (
    MPI,
    Group,
    begun,
    duplicate,
    is_complete,
    lack_of_threads,
    or_abort,
    receive,
    short_switch_interval,
)

# The steps of a handler. Each yields whether it has done something.
Steps = Iterator[bool]

# Nodes that a message names.
_SHOWN = 8
# In `Group.named`.
_NAME = "agent"
# Tags of requests, and of the data of the first service; tags of each service.
_REQUEST, _DATA = 1, 2
_CHANNELS = 4


class Service:
    """Handles the requests to one object; a base class. `Agent.add` begins it."""

    agent: Agent
    number: int

    def tell(self, nodes: Iterable[int], *request: Any) -> None:
        """Send a request to the agents of nodes."""
        for node in nodes:
            self.agent.request(node, self.number, *request)

    def tag(self, channel: int = 0) -> int:
        """Return the tag of a channel for data."""
        return _DATA + _CHANNELS * self.number + channel

    def handle(self, source: int, kind: Any, *request: Any) -> Steps:
        """Return the steps that carry out a request of the rank ``source``.

        Here, those that the method for its kind returns, which may be None.
        """
        steps: Steps | None = getattr(self, f"_do_{kind}")(*request)
        return iter(()) if steps is None else steps

    def _run_steps(self, steps: Steps) -> None:
        """Have the agent run steps, beside others; in a handler only."""
        self.agent._running.append((self.number, steps))

    def queues(self) -> dict[int, StepQueue]:
        """Return a queue of steps for each node, made at its first use."""
        return defaultdict(lambda: StepQueue(self._run_steps))


class StepQueue:
    """Steps of an agent that it runs one after the other; ``run`` makes it run some.

    It is `running` until all of them have ended.
    """

    def __init__(self, run: Callable[[Steps], None]) -> None:
        self._run, self.running = run, False
        self._waiting: deque[Steps] = deque()

    def add(self, steps: Steps) -> None:
        """Run steps after those that were added before."""
        self._waiting.append(steps)
        if not self.running:
            self.running = True
            self._run(self._run_all())

    def _run_all(self) -> Steps:
        while self._waiting:
            yield from self._waiting.popleft()
        self.running = False


class Agent:
    """The agent of this rank's node, as its ranks see it. Collective.

    `Agent.of` returns one agent for each group. Its thread runs as long as there are
    services.

    Attributes:
        comm: Communicator of all ranks, for the messages of agents only.
        leaders: The rank of each node's agent. The nodes are in the order of `Group`.
        hosts: The name of each node.
        node: The number of this rank's node.
        waiting: For changes on this node; the agent looks for threads of its rank.

    Raises:
        InvalidArgumentError: On every rank, if MPI provides no THREAD_MULTIPLE.
    """

    def __init__(self, group: Group) -> None:
        self.leaders = [ranks[0] for ranks in group.nodes]
        names = group.raise_together(
            "agents of nodes",
            _lack_of_threads(group.rank in self.leaders, len(self.leaders)),
            MPI.Get_processor_name(),
        )
        self.hosts = [names[rank] for rank in self.leaders]
        self.comm = duplicate(group.comm)
        self.node = group.node_number
        self._group = group
        # Requests of this rank to its own agent.
        self._own: deque[tuple[Any, ...]] = deque()
        self._awake = Wake()
        self.waiting = Waiting(blocks=self.is_leader)
        # By node, requests of this rank that its agent may not have received yet.
        self._sent: list[list[Any]] = [[] for _ in self.leaders]
        # How many requests this rank has sent to each service.
        self._requests: Counter[int] = Counter()
        # Several threads send requests.
        self._lock = threading.RLock()
        self._services: dict[int, Service] = {}
        # The number of the service that was removed last.
        self._removed: int | None = None
        # What the agent is doing, with the number of the service.
        self._running: list[tuple[int, Steps]] = []
        # Held from the receipt of a request until it is among them.
        self._accepting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @classmethod
    def of(cls, group: Group) -> Agent:
        """Return the agent of this rank's node, made at first use. Collective."""
        agent = group.named.get(_NAME)
        if agent is None:
            agent = group.named[_NAME] = cls(group)
        assert isinstance(agent, cls)
        return agent

    @property
    def is_leader(self) -> bool:
        """Whether the agent is a thread of this rank."""
        return self._group.rank == self.leaders[self.node]

    def is_gone(self, node: int) -> bool:
        """Whether the agent of a node is lost, and its node with it."""
        return self.leaders[node] in self._group.lost

    def in_turn(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes in an order that begins after this one.

        All nodes send at a time. If all began with the same node, its link would delay
        them while others are idle.
        """
        count = len(self.leaders)
        return sorted(nodes, key=lambda node: (node - self.node - 1) % count)

    def describe(self, nodes: Iterable[int]) -> str:
        """Return nodes as text: ``node h3 (leader rank 6)``; for messages."""
        found = sorted(nodes)
        names = [f"{self.hosts[n]} (leader rank {self.leaders[n]})" for n in found]
        if more := names[_SHOWN:]:
            names[_SHOWN:] = [f"{len(more)} more"]
        return f"{plural(len(found), 'node')} {', '.join(names)}"

    def add(self, service: Service) -> int:
        """Add a service; return its number, the same on all ranks. Collective.

        All ranks add and remove their services in the same order. Requests that come
        before this rank has added the service wait for it; then they come at once.
        """
        # MPI has few tags. Another rank may still be about to remove the last one.
        used = {*self._services, self._removed}
        number = next(n for n in itertools.count() if n not in used)
        service.agent, service.number = self, number
        self._services[number] = service
        if len(self._services) == 1 and self.is_leader:
            self._start()
        return number

    def remove(self, number: int, what: str) -> None:
        """Remove a service, when what it was asked for is done. Collective.

        The ranks have sent all of their requests; agents may still send some to carry
        them out.
        """
        deadline, sent, before = Deadline(None, what), -1, None
        # If none was sent since the round before, all had been received when this round
        # began, and every agent has been idle since then.
        while sent != before:
            before, mine, failure = sent, -1, None
            try:
                # How many this rank has sent, none of them during these waits.
                while mine != self._requests[number]:
                    mine = self._requests[number]
                    self._wait_for_requests(number, deadline)
            except WaitTimeoutError as error:
                # Raised by all ranks together, so that they can call it again.
                failure = error
            sent = sum(self._group.raise_together(what, failure, mine))
        self.discard(number)

    def discard(self, number: int) -> None:
        """Remove a service for which no rank has a request under way. Collective.

        There is another one that `remove` removes later: it waits for all ranks.
        """
        self._removed = number
        del self._services[number]
        self._requests.pop(number, None)
        if not self._services:
            self._stop()
            self.comm.Free()
            del self._group.named[_NAME]

    def _wait_for_requests(self, number: int, deadline: Deadline) -> None:
        def is_idle() -> bool | None:
            with self._accepting:
                return all(each != number for each, _ in list(self._running)) or None

        deadline.wait(
            is_idle,
            lambda: f"the agent of {self.describe([self.node])} to end its work",
        )
        deadline.wait(
            lambda: not self._unreceived() or None,
            lambda: f"the agents of {self.describe(self._unreceived())}",
        )

    def _unreceived(self) -> set[int]:
        with self._lock:
            self._forget_received()
            # Not iterated over: the thread of the agent takes requests from it.
            own = {self.node} if self._own else set()
            return own.union(itertools.compress(itertools.count(), self._sent))

    def request(self, node: int, number: int, *request: Any) -> None:
        """Send a request to a service of the agent of a node; do not wait."""
        message, to = (number, *request), self.leaders[node]
        with self._lock:
            # Before it is sent: `remove` must count it.
            self._requests[number] += 1
        if to == self._group.rank:
            self._own.append(message)
            self._awake.wake()
            return
        if self.is_gone(node):
            return
        with self._lock:
            self._forget_received()
            # Synchronous, so a request that is complete has been received.
            self._sent[node].append(begun(self.comm.issend, message, to, _REQUEST))

    def _forget_received(self) -> None:
        for node, sent in enumerate(self._sent):
            if sent:
                self._sent[node] = [each for each in sent if not is_complete(each)]

    def ask(self, rank: int, number: int, *request: Any) -> Any:
        """Send a request which is answered; return the request of MPI."""
        return self.comm.isend((number, *request), rank, _REQUEST)

    def wake(self) -> None:
        """Have the agent look for work often now, if it is a thread of this rank."""
        self._awake.wake()

    # The thread

    def _start(self) -> None:
        self._stopped = False
        name = f"agent of {self.describe([self.node])}"
        self._thread = threading.Thread(
            target=or_abort(self._run), daemon=True, name=name
        )
        self._thread.start()

    def _stop(self) -> None:
        if self._thread is None:
            return
        self._stopped = True
        self._awake.wake()
        # A thread of this rank: no limit of the user's applies.
        deadline = Deadline(math.inf, self._thread.name)
        deadline.join(self._thread, lambda: "its thread to end")
        self._thread = None

    def _run(self) -> None:
        last = time.monotonic()
        with short_switch_interval(), quiet():
            while not self._stopped:
                busy, idle = self._look(), time.monotonic() - last
                if not busy and idle < EAGER:
                    os.sched_yield()
                elif busy or self._awake.nap(self._group.progress.nap(idle)):
                    # If it was woken, it may expect something soon.
                    last = time.monotonic()

    def _look(self) -> bool:
        """Accept requests and run each handler once; return whether any is active."""
        busy = self._accept()
        for entry in list(self._running):
            done = next(entry[1], None)
            busy = busy or done is not False
            if done is None:
                self._running.remove(entry)
        self.waiting.look()
        return busy

    def _accept(self) -> bool:
        """Begin to handle what has arrived; return whether anything has."""
        busy = False
        while True:
            with self._accepting:
                if (received := self._receive()) is None:
                    return busy
                source, (number, *request) = received
                self._running.append((number, self._handle(number, source, *request)))
            busy = True

    def _receive(self) -> tuple[int, tuple[Any, ...]] | None:
        if self._own:
            return self._group.rank, self._own.popleft()
        return receive(self.comm, _REQUEST)

    def _handle(self, number: int, source: int, *request: Any) -> Steps:
        while (service := self._services.get(number)) is None:
            # Another rank has added it before this one.
            yield False
        yield from service.handle(source, *request)


def _lack_of_threads(leads: bool, nodes: int) -> Exception | None:
    if leads and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        needs = f"the first rank of each of {nodes} nodes needs to exchange data"
        return InvalidArgumentError(lack_of_threads(needs))
    return None

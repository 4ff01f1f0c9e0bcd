"""How the agents of all nodes reach each other about one object."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpcaccum.mpi import MPI
    from hpcaccum.nodes import Agent, Steps


class StepQueue:
    """Steps of an agent that it runs one after the other.

    Args:
        run: Makes the agent run steps.
    """

    def __init__(self, run: Callable[[Steps], None]) -> None:
        self._run, self._running = run, False
        self._waiting: deque[Steps] = deque()

    def add(self, steps: Steps) -> None:
        """Run steps after those that were added before."""
        self._waiting.append(steps)
        if not self._running:
            self._running = True
            self._run(self._run_all())

    def _run_all(self) -> Steps:
        while self._waiting:
            yield from self._waiting.popleft()
        self._running = False


class AgentLine:
    """The requests and messages of one service of the agents.

    Args:
        agent: That of this node.

    Attributes:
        number: Of the service, once it is added.
        node: Of the agent.
        leaders: The rank of each node's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent, self.node, self.leaders = agent, agent.node, agent.leaders
        self.number = -1

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator for the messages."""
        return self._agent.comm

    def tell(self, nodes: Iterable[int], *request: Any) -> None:
        """Send a request to the agents of nodes."""
        for node in nodes:
            self._agent.request(node, self.number, *request)

    def tag(self, channel: int = 0) -> int:
        """Return the tag of a channel."""
        return self._agent.tag(self.number, channel)

    def remove(self, what: str) -> None:
        """Remove the service, when all that it was asked for is done. Collective."""
        self._agent.remove(self.number, what)

    def run(self, steps: Steps) -> None:
        """Have this agent run steps, beside others."""
        self._agent.run(self.number, steps)

    def queue(self) -> StepQueue:
        """Return a queue of steps that this agent runs."""
        return StepQueue(self.run)

    def queues(self) -> dict[int, StepQueue]:
        """Return a queue for each node."""
        return {node: self.queue() for node in range(len(self.leaders))}

    def in_turn(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes in an order that begins after this one.

        All nodes send at a time. If all began with the same node, its link would delay
        them while others are idle.
        """
        count = len(self.leaders)
        return sorted(nodes, key=lambda node: (node - self.node - 1) % count)

"""The agent of the root's node: it orders steps, and has them sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.server.order_words import ANSWER, END, MADE, NEWEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.mpi import AtomicWords
    from hpcaccum.nodes import NodeParts, Place
    from hpcaccum.server.agent_line import AgentLine


class RootOrders:
    """Sends orders to all nodes concerned; knows which nodes wait for which step.

    A part of the `OrderAgent` of the root's node.

    Args:
        line: To the other agents.
        nodes: Of the servers; the first is the root's.
        parts: Where gradients lie.
        write: Sets a word of this node, and announces it.
        steps: Words of the root.
    """

    def __init__(
        self,
        line: AgentLine,
        nodes: Sequence[int],
        parts: NodeParts,
        write: Callable[[int, int], None],
        steps: AtomicWords,
    ) -> None:
        self._line, self._nodes, self._parts = line, nodes, parts
        self._write, self._steps = write, steps
        # The step that was ordered last.
        self._ordered = -1
        # The least step that each node waits for, and the last step sent to each.
        self._wants: dict[int, int] = {}
        self._sent: dict[int, int] = {}

    def begin(self, step: int) -> None:
        """Set the step of the parameters that the servers begin with."""
        self._ordered = step
        # Of agents whose messages came before this one.
        for node, wanted in list(self._wants.items()):
            self.want(node, wanted)

    def order(
        self,
        step: int,
        places: list[Place],
        divisor: int,
        rate: float | None,
        awaited: bool,
    ) -> None:
        """Send the order for a step to all nodes concerned."""
        self._ordered = step
        givers = set(self._parts.by_node(places))
        ready = {node for node, wanted in self._wants.items() if wanted <= step}
        if awaited:
            # They need not ask.
            ready |= givers
        for node in ready:
            self._wants.pop(node, None)
            self._sent[node] = step
        order = step, places, divisor, rate, sorted(ready)
        self._line.tell(givers.union(ready, self._nodes), "step", *order)

    def want(self, node: int, step: int) -> None:
        """Have a step sent to a node, now or when it is ordered."""
        if step <= self._sent.get(node, -1):
            return
        if step <= self._ordered:
            # If it waits for a later one, too, it asks again.
            self._wants.pop(node, None)
            self._sent[node] = self._ordered
            self._line.tell(self._nodes, "send", self._ordered, [node])
            self._line.tell([node], "coming", self._ordered)
        else:
            self._wants[node] = min(step, self._wants.get(node, step))

    def made(self, server: int, step: int) -> None:
        """Note that a server has made a step."""
        self._steps.write(NEWEST + 1 + server, step)
        self._write(MADE + server, step)

    def ask(self, question: int) -> None:
        """Have all servers answer a question, by its number."""
        self._line.tell(self._nodes, "obey", ANSWER, question)

    def end(self) -> None:
        """End the loops of all servers."""
        self._line.tell(self._nodes, "obey", END)

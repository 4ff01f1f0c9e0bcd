"""Calls of a function on the node of one rank, by the ranks of other nodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.nodes.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group
    from hpcaccum.nodes.agent import Steps


class Calls:
    """Has the agent of a rank's node call a function. Collective.

    A call is one message, and its answer another one. For what takes a rank several
    operations on words of another node this is faster.

    A rank makes one call at a time. If a signal handler raises during a call, `settle`
    returns the answer.

    Args:
        group: The ranks, on several nodes.
        root: The rank whose agent calls the function.
        function: Called with the calling rank and what it has passed, by the thread of
            the agent, and maybe before this returns; it must be fast. Its results are
            pickled, and never None.
        what: Name for messages.

    Raises:
        InvalidArgumentError: On every rank, if MPI provides no THREAD_MULTIPLE.
    """

    def __init__(
        self, group: Group, root: int, function: Callable[..., Any], what: str
    ) -> None:
        self._group, self._function, self._what = group, function, what
        node = next(n for n, ranks in enumerate(group.nodes) if root in ranks)
        self._agent = Agent.of(group)
        self._leader, self._node = self._agent.leaders[node], node
        # The message of the last call, and its answer.
        self._sent: list[Any] = []
        self._answers: list[Any] = []
        self._freed = False
        # Last: other ranks may call at once.
        self._tag: int | None = None
        self._number = self._agent.add(self)
        self._tag = self._agent.tag(self._number)

    def forget(self) -> None:
        """Forget the last call, before the next one."""
        # An interrupted one may not be settled.
        self.settle()
        # In this order: its answer must not pass for that of another one.
        self._sent.clear()
        self._answers.clear()

    def call(self, *question: Any) -> Any:
        """Call the function; return its result. `forget` comes first."""
        self._sent.extend(self._agent.ask(self._leader, self._number, *question))
        return self.settle()

    def settle(self) -> Any:
        """Wait for the result of the last call; return None if it was not sent.

        There is no limit: a call that was sent is carried out.
        """
        if not self._sent:
            return None
        # The heartbeat finds an agent that has died.
        Deadline(math.inf, self._what).wait(
            self._receive, lambda: f"the agent of {self._agent.describe([self._node])}"
        )
        return self._answers[0]

    def _receive(self) -> bool | None:
        """Receive the answer, if it has come; return whether all is complete."""
        comm, leader, tag = self._agent.comm, self._leader, self._tag
        assert tag is not None
        if not self._answers:
            if not comm.Iprobe(leader, tag):
                return None
            # In C throughout: what was received must be kept.
            self._answers.extend(map(comm.recv, (None,), (leader,), (tag,)))
        return all(each.Test() for each in self._sent) or None

    def handle(self, source: int, *question: Any) -> Steps:
        """Return the steps that answer a call."""
        while self._tag is None:
            yield False
        answer = self._function(source, *question)
        request = self._agent.comm.isend(answer, source, self._tag)
        while not request.Test():
            yield False

    def free(self) -> None:
        """Free it, when no rank makes calls any more. Collective."""
        if not self._freed:
            # All have their answers.
            self._group.allgather(None, f"{self._what}: calls")
            self._agent.discard(self._number)
            self._freed = True

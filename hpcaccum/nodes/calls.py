"""Calls of a function on the node of one rank, by other ranks."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from hpcaccum.deadline import EAGER, Deadline
from hpcaccum.errors import WaitTimeoutError
from hpcaccum.mpi import begun, is_complete, may_receive
from hpcaccum.nodes.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.mpi import Group
    from hpcaccum.nodes.agent import Steps


T = TypeVar("T")


class Calls:
    """Has the agent of a rank's node call a function. Collective.

    A call is one message, and its answer another one. For what takes a rank several
    operations on words of another node this is faster.

    A rank makes one call at a time. If `call` raises, the function may have been
    called, or will be: `settle` returns the answer.

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
        node = group.node_of[root]
        self._agent = Agent.of(group)
        self._leader, self._node = self._agent.leaders[node], node
        # Whether its thread, and the memory that the function changes, are this rank's.
        self._here = group.rank == root == self._leader
        # The message of the last call, and its answer.
        self._sent: Any = None
        self._answer: Any = None
        self._deadline = Deadline(None, what)
        self._freed = False
        # Last: other ranks may call at once.
        self._tag: int | None = None
        self._number = self._agent.add(self)
        self._tag = self._agent.tag(self._number)

    def forget(self) -> None:
        """Forget the last call, before the next one."""
        self.extend()
        # One whose wait an exception has ended may not be settled.
        self.settle()
        self._sent = self._answer = None

    def call(self, *question: Any) -> Any:
        """Call the function; return its result. `forget` comes first."""
        # Its node may soon have to send what the call is about.
        self.wake()
        self._sent = self._agent.ask(self._leader, self._number, *question)
        return self.settle()

    def wake(self) -> None:
        """Have the agent of this rank's node look for work often now."""
        self._agent.wake()

    def settle(self) -> Any:
        """Wait for the result of the last call; return None if it was not sent."""
        if self._sent is None:
            return None
        agent = self._agent.describe
        self._deadline.wait(
            self._receive, lambda: f"the answer of the agent of {agent([self._node])}"
        )
        return self._answer

    def extend(self, deadline: Deadline | None = None) -> None:
        """Set the time limit of the last call; by default, begin it anew."""
        self._deadline = deadline or Deadline(None, self._what)

    def _receive(self) -> bool | None:
        """Receive the answer, if it has come; return whether all is complete."""
        comm, leader, tag = self._agent.comm, self._leader, self._tag
        assert tag is not None
        if self._answer is None:
            if not may_receive(comm, leader, tag):
                return None
            self._answer = comm.recv(None, leader, tag)
        return is_complete(self._sent) or None

    def wait(
        self,
        look: Callable[[], T | None],
        changed: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
        *,
        soon: bool,
    ) -> T:
        """Do as `Deadline.wait`, for what calls change, or ranks of the root's node."""
        if not self._here:
            return deadline.wait(look, missing)
        polls_until = time.monotonic() + EAGER * soon
        while (found := look()) is None:
            if time.monotonic() < polls_until:
                os.sched_yield()
            else:
                self._agent.wait(changed, deadline, missing)
        return found

    def handle(self, source: int, *question: Any) -> Steps:
        """Return the steps that answer a call."""
        while self._tag is None:
            yield False
        answer = self._function(source, *question)
        request = begun(self._agent.comm.isend, answer, source, self._tag)
        while not is_complete(request):
            yield False

    def free(self) -> None:
        """Free it, when no rank makes calls any more. Collective."""
        if self._freed:
            return
        failure = None
        try:
            self.forget()
        except WaitTimeoutError as error:
            failure = error
        self._group.raise_together(f"{self._what}: calls", failure)
        self._agent.discard(self._number)
        self._freed = True

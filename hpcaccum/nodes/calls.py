"""Calls of a function on the node of one rank, by ranks of other nodes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from types import GeneratorType
from typing import Any, TypeVar

from hpcaccum.deadline import EAGER, Deadline
from hpcaccum.errors import InvalidArgumentError, LostRankError, WaitTimeoutError
from hpcaccum.mpi import Group, begun, is_complete, receive
from hpcaccum.nodes.agent import Agent, Service, Steps

T = TypeVar("T")

# Errors of the function that are raised where it was called from.
_ERRORS = (InvalidArgumentError, LostRankError, WaitTimeoutError)


class Call:
    """A call that has begun.

    Attributes:
        sent: The request of MPI for its message.
        answer: What the function has returned, or raised; None: nothing yet.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.sent: Any = None
        self.answer: Any = None

    def look(self) -> Any:
        """Return the answer if it has arrived; else None."""
        if self.answer is None:
            self._calls.receive()
        # MPI reads the message until then.
        return self.answer if is_complete(self.sent) else None

    def result(
        self,
        deadline: Deadline | None = None,
        missing: Callable[[], str] | None = None,
    ) -> Any:
        """Wait for what the function returns; raise what it raises.

        After an exception that ends the wait it can be called again.
        """
        calls = self._calls
        deadline = deadline or Deadline(None, calls.what)
        answer = deadline.wait(self.look, missing or calls.missing)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Calls(Service):
    """Has the agent of a rank's node call a function. Collective.

    A call is one message, and its answer another one. The agent makes the calls of one
    rank in the order in which they began. Several threads may make calls at a time.

    Args:
        group, what: The ranks, on several nodes; the name for messages.
        root: The rank whose agent calls the function.
        function: Called with the calling rank and what it has passed, by the thread of
            the agent, and maybe before this returns; it must be fast, or return steps
            (a generator) that yield whether they have done something. Results are
            pickled; None becomes True. Errors of hpcaccum are raised by `Call.result`.

    Attributes:
        near: Whether this rank is on the node of that agent.
        leads: Whether the agent is a thread of this rank.

    Raises:
        InvalidArgumentError: On every rank, if MPI provides no THREAD_MULTIPLE.
    """

    def __init__(
        self, group: Group, root: int, function: Callable[..., Any], what: str
    ) -> None:
        self._group, self._function, self.what = group, function, what
        agent, node = Agent.of(group), group.node_of[root]
        self._leader, self._node = agent.leaders[node], node
        self.near, self.leads = node == group.node_number, group.rank == self._leader
        # The calls that have no answer, by number; 0 is that of a call without one.
        self._open: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._freed = False
        # Last: other ranks may call at once.
        agent.add(self)

    def begin(self, *question: Any) -> Call:
        """Begin a call, and do not wait for its result."""
        # Its node may soon have to send what the call is about.
        self.agent.wake()
        number = next(self._numbers)
        # Before the question is sent: another thread may receive the answer.
        call = self._open[number] = Call(self)
        call.sent = self.agent.ask(self._leader, self.number, number, *question)
        return call

    def call(self, *question: Any) -> Any:
        """Call the function; return its result."""
        return self.begin(*question).result()

    def run(self, *question: Any) -> None:
        """Have the agent, a thread of this rank, call the function; do not wait."""
        self.tell([self._node], 0, *question)

    def receive(self) -> None:
        """Receive the answers that have arrived."""
        while found := receive(self.agent.comm, self.tag()):
            number, answer = found[1]
            self._open.pop(number).answer = answer

    def missing(self) -> str:
        """Return what a call waits for, for messages."""
        return f"the answer of the agent of {self.agent.describe([self._node])}"

    def wait(
        self,
        look: Callable[[], T | None],
        changed: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
    ) -> T:
        """Do as `Deadline.wait`, for what calls change, or ranks of the root's node."""
        if not self.leads:
            return deadline.wait(look, missing)
        polls_until = time.monotonic() + EAGER
        while (found := look()) is None:
            if time.monotonic() < polls_until:
                os.sched_yield()
            else:
                self.agent.waiting.wait(changed, deadline, missing)
        return found

    def handle(self, source: int, call: int, *question: Any) -> Steps:
        """Return the steps that answer a call."""
        try:
            answer = self._function(source, *question)
            if isinstance(answer, GeneratorType):
                answer = yield from answer
            # None means that there is no answer yet.
            answer = True if answer is None else answer
        except _ERRORS as error:
            answer = error
        if call:
            comm, tag = self.agent.comm, self.tag()
            request = begun(comm.isend, (call, answer), source, tag)
            while not is_complete(request):
                yield False

    def free(self) -> None:
        """Free it, when no rank makes calls any more. Collective."""
        if self._freed:
            return
        failure = None
        try:
            # The wait of some may have been ended by an exception.
            for call in [each for each in self._open.values() if each.sent]:
                Deadline(None, self.what).wait(call.look, self.missing)
        except WaitTimeoutError as error:
            failure = error
        self._group.raise_together(f"{self.what}: calls", failure)
        self.agent.discard(self.number)
        self._freed = True

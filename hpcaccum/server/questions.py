"""Questions of the root to all servers, which they answer between two updates."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.deadline import Deadline

_FIRST = operator.itemgetter(0)
_RECEIVE = operator.methodcaller("recv")
_TEST = operator.methodcaller("Test")


class Questions:
    """Sends questions and answers; used by `OrderLoop` and `ShardLoop`.

    A question is a message to each server, and an order to answer it. Both have its
    number.

    Args:
        comm: Of the agents.
        servers: Ranks; the first is the root.
        tags: Of questions, and of answers.
        order: Called with a number on the root; orders all servers to answer.
    """

    def __init__(
        self,
        comm: mpi4py_MPI.Intracomm,
        servers: Sequence[int],
        tags: tuple[int, int],
        order: Callable[[int], None],
    ) -> None:
        self._comm, self._servers, self._order = comm, servers, order
        self._question, self._answer = tags
        # On the root: the numbers of questions; those that wait for answers, of which a
        # signal handler may add one; and of each server, the answers by number.
        self._numbers, self._waiting = itertools.count(1), set[int]()
        self._answers: dict[int, dict[int, Any]] = {rank: {} for rank in servers}
        # On a server: the questions that it has received, by number.
        self._received: dict[int, Any] = {}
        # By tag: messages, which two threads send on the root, and the number of the
        # last one that was sent.
        self._messages: dict[int, list[Any]] = {tag: [] for tag in tags}
        self._last_sent: dict[int, int] = {}

    def ask(self, question: Any, deadline: Deadline) -> list[Any]:
        """Ask all servers between two updates; return their answers. The root only."""
        number = next(self._numbers)
        try:
            self._waiting.add(number)
            for rank in self._servers:
                self._send(number, question, rank, self._question)
            # Servers that are not asked for the answer skip the question.
            self._order(number)
            return [self._wait_for(rank, number, deadline) for rank in self._servers]
        finally:
            self._waiting.discard(number)
            self._forget_late()

    def _forget_late(self) -> None:
        """Forget answers to questions that were given up."""
        if not self._waiting:
            for answers in self._answers.values():
                answers.clear()

    def _wait_for(self, rank: int, number: int, deadline: Deadline) -> Any:
        """Wait for the answer of a server."""
        answers = self._answers[rank]

        def receive() -> bool | None:
            # In C throughout: a message that was matched must be received, and one that
            # was received must be kept.
            matched = map(self._comm.improbe, (rank,), (self._answer,))
            answers.update(map(_RECEIVE, filter(None, matched)))
            return number in answers or None

        deadline.wait(receive, lambda: f"the answer of server rank {rank}")
        return answers[number]

    def answer(self, find: Callable[[Any], Any], number: int) -> None:
        """Receive the question of that number and answer it; do not wait for the root.

        The root may have given it up: it receives the answer when it asks again.
        """
        # Not twice, if it was interrupted after that: none would receive the second
        # answer, but maybe a later service.
        if self._last_sent.get(self._answer) != number:
            answer = find(self._receive(number))
            self._send(number, answer, self._servers[0], self._answer)
        self._received.pop(number, None)

    def _receive(self, number: int) -> Any:
        """Return the question of that number."""
        receive, root = self._comm.recv, self._servers[0]
        while number not in self._received:
            # In C throughout: what was received must be kept.
            self._received.update(map(receive, (None,), (root,), (self._question,)))
        return self._received[number]

    def _send(self, number: int, content: Any, rank: int, tag: int) -> None:
        """Send a message that the other rank may never receive; keep it until then."""
        kept = self._messages[tag]
        _complete(kept)
        # In C throughout: no signal handler comes between these.
        sent = map(self._comm.isend, ((number, content),), (rank,), (tag,))
        noted = map(operator.setitem, (self._last_sent,), (tag,), (number,))
        kept.extend(map(_FIRST, zip(sent, noted, strict=False)))

    def are_received(self) -> bool:
        """Whether the other ranks have received all messages of this one."""
        return all(map(_complete, self._messages.values()))


def _complete(messages: list[Any]) -> bool:
    """Remove the messages that have been received; return whether all have."""
    # In C throughout: a signal handler may send others, too.
    messages[:] = itertools.filterfalse(_TEST, messages)
    return not messages

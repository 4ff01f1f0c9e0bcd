"""Questions of the root to all servers, which they answer between two updates."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.deadline import Deadline

_TEST = operator.methodcaller("Test")


class Questions:
    """Sends questions and answers; used by `OrderLoop` and `Orders`.

    A question is a message to each server, and an order to answer it, which ``order``
    gives. Both have its number. The ``tags`` are those of questions and of answers.
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
        # On the root: the numbers of questions; and of those that wait for answers, of
        # which a signal handler may add one, the answers by rank.
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[int, Any]] = {}
        # On a server: the questions that it has received, by number.
        self._received: dict[int, Any] = {}
        # By tag: messages, which two threads send on the root.
        self._messages: dict[int, list[Any]] = {tag: [] for tag in tags}

    def ask(self, question: Any, deadline: Deadline) -> list[Any]:
        """Ask all servers between two updates; return their answers. The root only."""
        number = next(self._numbers)
        self._answers[number] = {}
        try:
            for rank in self._servers:
                self._send(number, question, rank, self._question)
            # Servers that are not asked for the answer skip the question.
            self._order(number)
            return [self._wait_for(rank, number, deadline) for rank in self._servers]
        finally:
            del self._answers[number]

    def _wait_for(self, rank: int, number: int, deadline: Deadline) -> Any:
        """Wait for the answer of a server."""
        answers = self._answers[number]

        def receive() -> bool | None:
            if (message := self._comm.improbe(rank, self._answer)) is not None:
                answered, answer = message.recv()
                # Not if it was given up.
                if answered in self._answers:
                    self._answers[answered][rank] = answer
            return rank in answers or None

        deadline.wait(receive, lambda: f"the answer of server rank {rank}")
        return answers[rank]

    def answer(
        self, find: Callable[[Any], Any], number: int, deadline: Deadline
    ) -> None:
        """Receive the question of that number and answer it; do not wait for the root.

        The root may have given it up: it receives the answer when it asks again.
        """
        root = self._servers[0]

        def receive() -> bool | None:
            if (message := self._comm.improbe(root, self._question)) is not None:
                other, question = message.recv()
                self._received[other] = question
            return number in self._received or None

        deadline.wait(receive, lambda: f"the question of rank {root}")
        answer = find(self._received.pop(number))
        self._send(number, answer, root, self._answer)

    def _send(self, number: int, content: Any, rank: int, tag: int) -> None:
        """Send a message that the other rank may never receive; keep it until then."""
        kept = self._messages[tag]
        _complete(kept)
        kept.append(self._comm.isend((number, content), rank, tag))

    def are_received(self) -> bool:
        """Whether the other ranks have received all messages of this one."""
        return all(map(_complete, self._messages.values()))


def _complete(messages: list[Any]) -> bool:
    """Remove the messages that have been received; return whether all have."""
    # In C throughout: a signal handler may send others, too.
    messages[:] = itertools.filterfalse(_TEST, messages)
    return not messages

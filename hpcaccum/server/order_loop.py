"""The loop of the host of several servers: decide what makes each update, order it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.server.update_loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.accumulator import Batch
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.sharded import ShardedParameters
    from hpcaccum.server.update_lock import UpdateLock


class OrderLoop(Loop):
    """Takes gradients and has all servers make an update of each batch.

    Args:
        inbox, lock, what: See `Loop`.
        parameters: Has the servers.

    Attributes:
        rate: Returns the learning rate of the next update; None if servers find it.
        last_answers: Of all servers after the last update, to the question None.
    """

    def __init__(
        self, inbox: Inbox, parameters: ShardedParameters, lock: UpdateLock, what: str
    ) -> None:
        super().__init__(inbox, lock, what)
        self._parameters = parameters
        self.rate: Callable[[], float | None] = lambda: None
        self.last_answers: list[Any] | None = None

    def made(self) -> int:
        """Return the step that all servers have made."""
        return self._parameters.made()

    def set_step(self, step: int) -> None:
        """Begin with a step that the servers have."""
        super().set_step(step)
        self._parameters.begin(step)

    def _make_step(self, step: int, deadline: Deadline, batch: Batch) -> None:
        # A rank that gave one of several gradients waits for their update.
        awaited = self._inbox.adds
        self._parameters.update(step, batch, self.rate(), deadline, awaited=awaited)

    def run(self) -> None:
        """Order updates until all ranks have left; then end the loops of servers."""
        super().run()
        deadline = Deadline(math.inf, f"{self._what}: end")
        # Another thread of this rank may ask, too.
        with self._lock.updating():
            if self.last_answers is None:
                self.last_answers = self._parameters.ask(None, deadline)
                self._parameters.end()

"""The loop of the root of several servers: decide what makes each update, order it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.server.node_copy import version_of
from hpcaccum.server.update_loop import Loop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum.accumulator import Batch
    from hpcaccum.dtypes import Array
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.role import Answer, Rate, Update
    from hpcaccum.server.shard_loop import ShardLoop
    from hpcaccum.server.sharded import ShardedParameters
    from hpcaccum.server.update_lock import UpdateLock


class OrderLoop(Loop):
    """Takes gradients and has all servers make an update of each batch.

    Args:
        inbox, lock, what: See `Loop`.
        parameters: Has the servers.
        shard: The loop of this rank's own part, as the root is one of the servers.

    Attributes:
        shard: That loop.
        rate: Returns the learning rate of the next update; None if servers find it.
        last_answers: Of all servers after the last update, to the question None.
    """

    def __init__(
        self,
        inbox: Inbox,
        lock: UpdateLock,
        what: str,
        parameters: ShardedParameters,
        shard: ShardLoop,
    ) -> None:
        super().__init__(inbox, lock, what)
        self._parameters, self._step = parameters, parameters.ordered
        self.shard, self.center = shard, shard.center
        self.rate: Rate = lambda: None
        self.last_answers: list[Any] | None = None

    def set_optimizer(self, update: Update, rate: Rate, answer: Answer) -> None:
        """Set what finds learning rates, and what updates this rank's part."""
        self.rate = rate
        self.shard.set_optimizer(update, rate, answer)

    def made(self) -> int:
        """Return the step up to which `run` has made all; servers may be ahead."""
        return self._step

    def set_step(self, step: int) -> None:
        """Begin with a step that the servers have."""
        super().set_step(step)
        self._parameters.begin(step)
        self._step = step

    def _make_step(self, step: int, deadline: Deadline, batch: Batch) -> None:
        self._order(step, batch)
        version = version_of(step)
        self._parameters.wait_for_servers(version, deadline, self._order_ahead)
        self._step = step

    def _order(self, step: int, batch: Batch) -> None:
        """Order a step, unless it was ordered already."""
        if step > self._parameters.ordered:
            # A rank that gave one of several gradients waits for their update.
            awaited = self._inbox.adds
            self._parameters.order(step, batch, self.rate(), awaited=awaited)

    def _order_ahead(self) -> None:
        """Order the next steps if their gradients are there, while there is memory."""
        parameters = self._parameters
        # It is called before the next update.
        if self.after_update is not None:
            return
        while (step := parameters.ordered) < parameters.made() + parameters.buffers:
            batch = self._inbox.following(step)
            if batch is None:
                return
            self._order(step + 1, batch)

    def wait_for_ordered(self, deadline: Deadline) -> None:
        """Wait until servers have made the updates that were ordered ahead."""
        ordered = version_of(self._parameters.ordered)
        self._parameters.wait_for_servers(ordered, deadline)

    def ask(self, question: Any) -> list[Any]:
        """Return the answers of all servers; after the last update, those to None."""
        if self.last_answers is not None:
            return self.last_answers
        deadline = Deadline(None, f"{self._what}: servers")
        return self._parameters.questions.ask(question, deadline)

    def keep(self, values: Mapping[str, Array]) -> None:
        """Keep what will be assigned."""
        self.shard.keep(values)

    def assign(self, deadline: Deadline) -> int:
        """Order all servers to assign what they kept; return its version."""
        version = self._parameters.order_again()
        if self._thread is not None:
            self._parameters.wait_for_servers(version, deadline)
        # Dedicated servers do it when they serve again.
        return version

    def come_back(self) -> None:
        """Let `run` and the loop of this rank's own part serve again."""
        self.last_answers = None
        self.shard.end(Deadline(None, f"{self._what}: own part"))
        self.shard.come_back()

    def run(self) -> None:
        """Order updates until all ranks have left; then end the loops of servers."""
        self.shard.start_thread()
        super().run()
        deadline = Deadline(math.inf, f"{self._what}: end")
        # Another thread of this rank may ask, too.
        with self._lock.updating():
            if self.last_answers is None:
                answers = self._parameters.questions.ask(None, deadline)
                self._parameters.end()
                self.last_answers = answers

    def end(self, deadline: Deadline) -> None:
        """Wait until both threads have ended; see `Role.end`."""
        super().end(deadline)
        self.shard.end(deadline)

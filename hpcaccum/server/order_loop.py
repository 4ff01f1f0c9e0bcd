"""The loop of the root of several servers: decide what makes each update, order it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.server.double_buffer import version_of
from hpcaccum.server.loop import Loop
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.accumulator import Batch
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.loop import UpdateLoop
    from hpcaccum.server.orders import Orders
    from hpcaccum.server.update_lock import UpdateLock


class OrderLoop(Loop):
    """Takes gradients and has all servers make an update of each batch.

    Args:
        inbox, lock, what: See `Loop`.
        orders: To the servers.
        part: The loop of this rank's own part, as the root is one of the servers.

    Attributes:
        rate: Returns the learning rate of the next update; None if servers find it.
        last_answers: Of all servers after the last update, to the question None.
    """

    _inbox: Inbox

    def __init__(
        self,
        inbox: Inbox,
        lock: UpdateLock,
        what: str,
        orders: Orders,
        part: UpdateLoop,
    ) -> None:
        super().__init__(inbox, lock, what)
        self._orders, self._part = orders, part
        self.rate: Callable[[], float | None] = lambda: None
        self.last_answers: list[Any] | None = None

    def set_step(self, step: int) -> None:
        """Begin with a step that all servers publish."""
        self._step = step
        self._orders.begin(step)

    @traced("update", lambda args, _: {"step": args[1].step + 1})
    def _make(self, batch: Batch, deadline: Deadline) -> None:
        step = batch.step + 1
        with self._lock.updating():
            self._order(step, batch)
            version = version_of(step)
            self._orders.wait_for_servers(version, deadline, self._order_ahead)
            self._step = step

    def _order(self, step: int, batch: Batch) -> None:
        """Order a step, unless it was ordered already."""
        if step > self._orders.ordered:
            # A rank that gave one of several gradients waits for their update.
            self._orders.order(step, batch, self.rate(), awaited=self._inbox.adds)

    def _order_ahead(self) -> None:
        """Order the next steps if their gradients are there, while there is memory."""
        orders = self._orders
        # It is called before the next update.
        if self.after_update is not None:
            return
        while (step := orders.ordered) < orders.made() + orders.buffers:
            batch = self._inbox.following(step)
            if batch is None:
                return
            self._order(step + 1, batch)

    def wait_for_ordered(self, deadline: Deadline) -> None:
        """Wait until servers have made the updates that were ordered ahead."""
        self._orders.wait_for_servers(version_of(self._orders.ordered), deadline)

    def ask(self, question: Any) -> list[Any]:
        """Return the answers of all servers; after the last update, those to None."""
        if self.last_answers is not None:
            return self.last_answers
        deadline = Deadline(None, f"{self._what}: servers")
        return self._orders.questions.ask(question, deadline)

    def assign(self, deadline: Deadline) -> int:
        """Order all servers to assign what they kept; return its version."""
        version = self._orders.order_again()
        if self._thread is not None:
            self._orders.wait_for_servers(version, deadline)
        # Dedicated servers do it when they serve again.
        return version

    def come_back(self) -> None:
        """Let `run` and the loop of this rank's own part serve again."""
        self.last_answers = None
        self._part.end(Deadline(None, f"{self._what}: own part"))
        self._part.come_back()

    def run(self) -> None:
        """Order updates until all ranks have left; then end the loops of servers."""
        self._part.start_thread()
        super().run()
        deadline = Deadline(math.inf, f"{self._what}: end")
        # Another thread of this rank may ask, too.
        with self._lock.updating():
            if self.last_answers is None:
                answers = self._orders.questions.ask(None, deadline)
                self._orders.end()
                self.last_answers = answers

    def end(self, deadline: Deadline) -> None:
        """Wait until both threads have ended; see `Loop.end`."""
        super().end(deadline)
        self._part.end(deadline)

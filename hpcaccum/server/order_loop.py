"""The loop of the root of several servers: decide what makes each update, order it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccum.deadline import Deadline
from hpcaccum.server.double_buffer import step_of, version_of
from hpcaccum.server.loop import Loop
from hpcaccum.server.orders import END
from hpcaccum.server.part import Order
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.accumulator import Batch
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.loop import UpdateLock, UpdateLoop
    from hpcaccum.server.orders import Orders


class OrderLoop(Loop):
    """Takes gradients and has all servers make an update of each batch.

    The root is one of the servers: ``part`` is the loop of its own part.

    Attributes:
        rate: Returns the learning rate of the next update; None if servers find it.
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
        self._orders, self._part, self._publisher = orders, part, orders.publisher
        self.rate: Callable[[], float | None] = lambda: None
        # The step that was ordered last.
        self._ordered = -1
        # What all servers have answered to the question None after the last update.
        self._last_answers: list[Any] | None = None

    def set_step(self, step: int) -> None:
        """Begin with a step that all servers publish."""
        self._step = self._ordered = step
        version = version_of(step)
        self._publisher.announce(version)
        for server in range(len(self._publisher.nodes)):
            self._publisher.note_made(server, version)
        self._orders.request("begin", version)

    @traced("update", lambda args, _: {"step": args[1].step + 1})
    def _make(self, batch: Batch, deadline: Deadline) -> None:
        with self._lock.updating():
            # Unless it was ordered already.
            if batch.step == self._ordered:
                self._order_next(batch)
            version = version_of(batch.step + 1)
            self._wait_for_servers(version, deadline, self._order_ahead)
            self._step = batch.step + 1

    def _order_next(self, batch: Batch) -> None:
        version, places = version_of(batch.step + 1), list(batch.places)
        order = Order(version, places, batch.divisor, batch.factor, self.rate())
        # A rank that gave one of several gradients waits for their update.
        self._give(order, self._inbox.adds)
        self._ordered = batch.step + 1

    def _give(self, order: Order, awaited: bool) -> None:
        # Before any rank can have this version, `newest_version` must return it.
        self._publisher.announce(order.version)
        self._orders.request("order", order, awaited)

    def _order_ahead(self) -> None:
        """Order the next steps if their gradients are there, while there is memory."""
        # It is called before the next update.
        if self.after_update is not None:
            return
        while self._ordered < step_of(self._publisher.made()) + self._orders.buffers:
            batch = self._inbox.following(self._ordered)
            if batch is None:
                return
            self._order_next(batch)

    def _wait_for_servers(
        self,
        version: int,
        deadline: Deadline,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until all servers have made a version."""

        def made() -> bool:
            meanwhile()
            return self._publisher.made() >= version

        self._publisher.changed.wait(
            made,
            deadline,
            lambda: self._publisher.under_way(version) or "its own agent",
        )

    def wait_for_ordered(self, deadline: Deadline) -> None:
        """Wait until servers have made the updates that were ordered ahead."""
        self._wait_for_servers(version_of(self._ordered), deadline)

    def ask(self, question: Any) -> list[Any]:
        """Return the answers of all servers; after the last update, those to None."""
        if self._last_answers is not None:
            return self._last_answers
        deadline = Deadline(None, f"{self._what}: servers")
        return self._orders.ask(question, deadline)

    def assign(self, deadline: Deadline) -> int:
        """Order all servers to assign what they kept; return its version."""
        version = self._publisher.newest_version() + 1
        self._give(Order(version), False)
        if self._thread is not None:
            self._wait_for_servers(version, deadline)
        # Dedicated servers do it when they serve again.
        return version

    def come_back(self) -> None:
        """Let `run` and the loop of this rank's own part serve again."""
        self._last_answers = None
        self._part.end(Deadline(None, f"{self._what}: own part"))
        self._part.come_back()

    def run(self) -> None:
        """Order updates until all ranks have left; then end the loops of servers."""
        self._part.start_thread()
        super().run()
        deadline = Deadline(math.inf, f"{self._what}: end")
        # Another thread of this rank may ask, too.
        with self._lock.updating():
            if self._last_answers is None:
                answers = self._orders.ask(None, deadline)
                self._orders.request("all_obey", END)
                self._last_answers = answers

    def end(self, deadline: Deadline) -> None:
        """Wait until both threads have ended; see `Loop.end`."""
        super().end(deadline)
        self._part.end(deadline)

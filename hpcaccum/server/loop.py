"""The loop of a server: take gradients, update a part of the center, publish it.

The root of several servers also decides what makes each update, and orders it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcaccum.accumulator import Batch
from hpcaccum.deadline import Deadline
from hpcaccum.dtypes import Array
from hpcaccum.errors import BrokenObjectError, EverybodyLeftError
from hpcaccum.mpi import or_abort
from hpcaccum.nodes import LostNodeError
from hpcaccum.server.double_buffer import step_of, version_of
from hpcaccum.server.node_update import NodeUpdate
from hpcaccum.server.options import Inbox
from hpcaccum.server.orders import END, Orders
from hpcaccum.server.part import Center, Order
from hpcaccum.server.publisher import Publisher
from hpcaccum.spans import traced

Update = Callable[[dict[str, Any], float | None], object]


class Loop:
    """Takes gradients and makes an update of each batch, until all ranks have left.

    In a thread of its own, or in the thread that calls `run`. The ``lock`` is held
    during each update.
    """

    # Called with the step after each update, before the next one.
    after_update: Callable[[int], object] | None = None
    _thread: threading.Thread | None = None
    # Whether an update has begun to change the center and not ended.
    _broken = False
    # The step that the center has.
    _step = -1

    def __init__(self, inbox: Inbox | Orders, lock: UpdateLock, what: str) -> None:
        self._inbox, self._lock, self._what = inbox, lock, what

    def run(self) -> None:
        """Make updates until all ranks have left. Goes on if a wait was interrupted."""
        if self._broken:
            raise BrokenObjectError(
                "an exception has ended an update, and the parameters are now partly "
                "updated: continue from a checkpoint"
            )
        with contextlib.suppress(EverybodyLeftError):
            while True:
                # Those who wait for an update have a limit; an idle server has none.
                deadline = Deadline(math.inf, f"{self._what}: update {self._step + 1}")
                try:
                    with self._inbox.next(self._step, deadline) as batch:
                        self._make(batch, deadline)
                except LostNodeError:
                    # Again, without the gradients of that node.
                    continue
                self._broken = False
                if self.after_update is not None:
                    self.after_update(self._step)

    def _make(self, batch: Any, deadline: Deadline) -> None:
        """Make an update of a batch of gradients."""
        raise NotImplementedError

    def assign(self, version: int) -> None:
        """Set the center to what servers keep, and publish it as a version."""
        raise NotImplementedError

    # The thread

    def start_thread(self) -> None:
        """Call `run` in a thread, unless there is one."""
        if self._thread is not None:
            return
        name = f"server ({type(self).__name__})"
        self._thread = threading.Thread(
            target=or_abort(self.run), daemon=True, name=name
        )
        self._thread.start()

    def end(self, deadline: Deadline) -> None:
        """Wait for the end of the thread, if there is one, when all ranks have left."""

        def missing() -> str:
            lacks, step = self._inbox.awaited(self._step), self._step
            return (
                f"the last updates of this rank, at step {step}, which waits for "
                f"{lacks or 'the update itself'}"
            )

        if self._thread is not None:
            deadline.join(self._thread, missing)

    def come_back(self) -> None:
        """Let `run`, which has ended, serve again."""
        self._thread = None


class UpdateLoop(Loop):
    """Updates the center, or a part of it, on this rank, and publishes it.

    If there is a ``node_update``, it has the center, and the other ranks of the node
    help to update it.

    Attributes:
        center: What this rank has of it.
        update: Changes the center. Gets gradients by name, arrays or `IndexedSlices`;
            and a learning rate, or None for the optimizer's own.
        kept: What `assign` will assign.
    """

    update: Update

    def __init__(
        self,
        inbox: Inbox | Orders,
        lock: UpdateLock,
        what: str,
        center: Center,
        publisher: Publisher,
        node_update: NodeUpdate | None = None,
    ) -> None:
        super().__init__(inbox, lock, what)
        self.center, self._publisher, self._node_update = center, publisher, node_update
        self.kept: Mapping[str, Array] = {}

    def set_step(self, step: int) -> None:
        """Publish the center as that of a step, before any rank pushes or pulls."""
        self._step = step
        self._publish(version_of(step))
        # The other copy too, so that no update of rows has to copy whole tables.
        self.center.write(self._publisher.own.begin(version_of(step)))

    def _publish(self, version: int) -> None:
        self.center.write(self._publisher.own.begin(version))
        self._publisher.complete(version)

    @traced("update", lambda args, _: {"step": args[1].step + 1})
    def _make(self, batch: Any, deadline: Deadline) -> None:
        version = version_of(batch.step + 1)
        with self._lock:
            flat = self._publisher.own.begin(version)
            if not self._update_together(batch, flat):
                if grads := self.center.read(batch, deadline):
                    self._broken = True
                    self.center.note(grads)
                    rate = batch.rate if isinstance(batch, Order) else None
                    self.update(grads, rate)
                self.center.write(flat)
            # A rank that gave one of several gradients waits for their update.
            self._publisher.complete(version, batch.places if self._inbox.adds else ())
            self._step = batch.step + 1

    def _update_together(self, batch: Any, flat: Array) -> bool:
        """Update the center and write it to a vector, if all ranks can help."""
        if self._node_update is None or not self.center.wire.is_complete(batch):
            return False
        self._broken = True
        # All gradients are here: only ranks that work on it are waited for.
        what = f"{self._what}: update {batch.step + 1}"
        return self._node_update.apply(batch, flat, what)

    def assign(self, version: int) -> None:
        """Set the center to what was kept, and publish it as a version."""
        self.center.assign(self.kept)
        self.kept = {}
        self._publish(version)


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
        self._publisher.begin(version_of(step))

    @traced("update", lambda args, _: {"step": args[1].step + 1})
    def _make(self, batch: Batch, deadline: Deadline) -> None:
        with self._lock:
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

        self._publisher.waiting.wait(
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

    def assign(self, version: int) -> None:
        """Order all servers to assign what they kept."""
        self._give(Order(version), False)
        # Dedicated servers do it when they serve again.
        if self._thread is not None:
            deadline = Deadline(None, f"{self._what}: assign")
            self._wait_for_servers(version, deadline)

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
        with self._lock:
            if self._last_answers is None:
                answers = self._orders.ask(None, deadline)
                self._orders.request("all_obey", END)
                self._last_answers = answers

    def end(self, deadline: Deadline) -> None:
        """Wait until both threads have ended; see `Loop.end`."""
        super().end(deadline)
        self._part.end(deadline)


class UpdateLock:
    """Held by a server during each update, and by readers between two updates.

    A waiting reader comes before the next update, however busy the server is: it holds
    a gate that the server must pass. The thread that holds the lock may read again, so
    a function that an update calls (a learning rate) may read too.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Reentrant, also for a signal handler that reads.
        self._gate, self._lock = threading.RLock(), threading.RLock()
        self._reader: int | None = None

    def __enter__(self) -> None:
        """Hold the lock during an update.

        No time limit: the ranks that wait for the update have one.
        """
        self._pass(self._gate)
        try:
            self._pass(self._lock)
        finally:
            self._gate.release()

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._lock.release()

    def _pass(self, lock: Any) -> None:
        # Almost always free: a deadline would cost more than the lock.
        if not lock.acquire(blocking=False):
            deadline = Deadline(math.inf, f"{self._what}: update")
            deadline.acquire(lock, lambda: "a read of this rank to end")

    @contextlib.contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock between two updates, before the next one."""
        again = self.is_read_by_this_thread()
        # Without the gate if this thread holds the lock: another reader may hold the
        # gate while it waits for this one.
        if not self._lock.acquire(blocking=False):
            missing = "a read by another thread of this rank to end"
            deadline.acquire(self._gate, lambda: missing)
            try:
                deadline.acquire(self._lock, lambda: "an update of this rank to end")
            finally:
                self._gate.release()
        try:
            self._reader = threading.get_ident()
            yield
        finally:
            if not again:
                self._reader = None
            self._lock.release()

    def is_read_by_this_thread(self) -> bool:
        """Whether this thread prevents updates."""
        return self._reader == threading.get_ident()

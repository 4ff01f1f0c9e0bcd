"""The loop of a single server: take gradients, update the center, publish it."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import to_host
from hpcaccum.errors import EverybodyLeftError
from hpcaccum.server.background import Background
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum.accumulator import Batch
    from hpcaccum.dtypes import Array
    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.node_update import NodeUpdate
    from hpcaccum.server.parameter_copies import Copier
    from hpcaccum.server.parameters import Parameters
    from hpcaccum.server.role import Answer, Rate, Update
    from hpcaccum.server.update_lock import UpdateLock
    from hpcaccum.server.wire_format import WireFormat


class Loop(Background):
    """Takes gradients and makes an update of each batch; on the root only.

    Args:
        inbox: Where gradients come from.
        lock: Held during each update.
        what: Name for messages.
    """

    def __init__(self, inbox: Inbox, lock: UpdateLock, what: str) -> None:
        super().__init__()
        self._inbox, self._lock, self._what = inbox, lock, what

    def made(self) -> int:
        """Return the step that the center has."""
        raise NotImplementedError

    def set_step(self, step: int) -> None:
        """Publish the center as that of a step, before any rank pushes or pulls."""
        self._inbox.start(step)

    def run(self) -> None:
        """Make updates until all ranks have left."""
        self._check_whole()
        with contextlib.suppress(EverybodyLeftError):
            while True:
                step = self.made()
                # Those who wait for an update have a limit; an idle server has none.
                deadline = Deadline(math.inf, f"{self._what}: update {step + 1}")
                use = functools.partial(self._make_in_turn, deadline)
                self._inbox.next(step, deadline, use)
                self._broken = False
                if self.after_update is not None:
                    self.after_update(self.made())

    @traced("update", lambda args, _: {"step": args[2].step + 1})
    def _make_in_turn(self, deadline: Deadline, batch: Batch) -> None:
        with self._lock.updating():
            self._make_step(batch.step + 1, deadline, batch)

    def _make_step(self, step: int, deadline: Deadline, batch: Batch) -> None:
        """Update the center with a batch of gradients, and publish it."""
        raise NotImplementedError

    def _unfinished(self) -> str:
        step = self.made()
        lacks = self._inbox.awaited(step) or "the update itself"
        return f"the last updates of this rank, at step {step}, which waits for {lacks}"


class UpdateLoop(Loop):
    """Updates the whole center on this rank.

    Args:
        inbox, lock, what: See `Loop`.
        initial: Name to array: the center starts with these.
        parameters: Where the center is published.
        wire: How gradients and parameters lie in flat vectors.
        copier: Copies parameters to such vectors.
        node_update: Has the center, and makes updates with the other ranks of the node;
            None if it cannot.
        threads: To use for sums.
    """

    def __init__(
        self,
        inbox: Inbox,
        lock: UpdateLock,
        what: str,
        initial: Mapping[str, Array],
        *,
        parameters: Parameters,
        wire: WireFormat,
        copier: Copier,
        node_update: NodeUpdate | None,
        threads: int,
    ) -> None:
        super().__init__(inbox, lock, what)
        self.update: Update | None = None
        self._parameters, self._wire, self._copier = parameters, wire, copier
        self._node_update, self._threads = node_update, threads
        self._kept: Mapping[str, Array] = {}
        # The memory of each sum, allocated once.
        self._sum: Array | None = None
        self._make_center(initial)

    def _make_center(self, initial: Mapping[str, Array]) -> None:
        if self._node_update is None:
            self.center = {n: np.array(to_host(a)) for n, a in initial.items()}
            return
        self.center, self.slots = self._node_update.center, self._node_update.slots
        for name, array in initial.items():
            np.copyto(self.center[name], to_host(array))

    def set_optimizer(self, update: Update, rate: Rate, answer: Answer) -> None:
        """Set what updates the center."""
        self.update = update

    def made(self) -> int:
        """Return the step that is published."""
        return self._parameters.version()

    def set_step(self, step: int) -> None:
        """Publish the center as that of a step."""
        super().set_step(step)
        self._parameters.publish(self._fill, step)
        if self._wire.rows:
            # The other copy too, so that no update has to copy whole tables.
            copies = self._parameters.copies
            self._fill(copies.copy(copies.writing))

    def keep(self, values: Mapping[str, Array]) -> None:
        """Keep what will be assigned."""
        self._kept = values

    def assign(self, deadline: Deadline) -> int:
        """Set the center to what was kept; return the version that has it."""
        self._copier.note(
            {p.name: np.arange(len(self.center[p.name])) for p in self._wire.rows}
        )
        for name, array in self._kept.items():
            np.copyto(self.center[name], array)
        self._kept = {}
        return self._parameters.publish_again(self._fill)

    def _make_step(self, step: int, deadline: Deadline, batch: Batch) -> None:
        def fill(flat: Array) -> None:
            if not self._update_together(batch, flat):
                self._update_alone(batch, deadline)
                self._fill(flat)

        # A rank that gave one of several gradients waits for their update.
        waiting = [rank for rank, _ in batch.places] if self._inbox.adds else []
        self._parameters.publish(fill, step, waiting)

    def _update_together(self, batch: Batch, flat: Array) -> bool:
        """Update the center and write it to a vector, if all ranks can help."""
        if self._node_update is None or not self._wire.is_complete(batch):
            return False
        self._broken = True
        # All gradients are here: only ranks that work on it are waited for.
        deadline = Deadline(None, f"{self._what}: update {batch.step + 1}")
        return self._node_update.apply(batch, flat, deadline)

    def _update_alone(self, batch: Batch, deadline: Deadline) -> None:
        # There is no gradient if its rank was admitted and then failed to write.
        if not batch.places:
            return
        # First: the total is in memory that they need, too.
        parts = {p.name: batch.rows(p, deadline) for p in self._wire.rows}
        total = self._total(batch, deadline)
        rows = self._wire.read_rows(parts, total, batch.divisor) if parts else {}
        grads = {**self._wire.read_gradients(total), **rows}
        self._broken = True
        self._copier.note({name: each.indices for name, each in rows.items()})
        if grads and self.update is not None:
            self.update(grads, None)

    def _total(self, batch: Batch, deadline: Deadline) -> Array:
        """Return the sum of the arrays of a batch, which may be changed."""
        size = self._wire.gradients.size
        if not batch.is_local:
            return batch.collect(size, deadline)
        if len(batch.places) == 1 and batch.divisor == 1:
            # Every variable has one gradient or none, so nothing is changed.
            return batch.views(size)[0]
        if self._sum is None:
            self._sum = np.empty(size, batch.dtype)
        with np.errstate(all="ignore"):
            batch.total(self._sum, deadline, self._threads)
        return self._sum

    def _fill(self, flat: Array) -> None:
        self._copier.write(self.center, flat, self._parameters.copies.writing)

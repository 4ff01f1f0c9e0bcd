"""The loop of a parameter server: take gradients, update the center, publish it."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.errors import EverybodyLeftError
from hpcaccum.mpi import report_and_abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.server.inbox import Inbox
    from hpcaccum.server.parameters import Parameters
    from hpcaccum.server.update_lock import UpdateLock
    from hpcaccum.server.wire_format import WireFormat

    Update = Callable[[dict[str, "Array"]], None]

Array = np.ndarray[Any, Any]


class UpdateLoop:
    """Takes gradients, updates the center, publishes it; on the root only.

    Args:
        center: Name to array, which the updates change.
        inbox, parameters, wire: Where gradients come from, where parameters go to, and
            how both lie in flat vectors.
        lock: Held during each update.
        what: Name for messages.
    """

    def __init__(
        self,
        center: dict[str, Array],
        inbox: Inbox,
        parameters: Parameters,
        wire: WireFormat,
        lock: UpdateLock,
        what: str,
    ) -> None:
        self.center = center
        self.update: Update | None = None
        self._inbox, self._parameters, self._wire = inbox, parameters, wire
        self._lock, self._what = lock, what
        self._thread: threading.Thread | None = None

    def set_step(self, step: int) -> None:
        """Publish the center as that of a step, before any rank pushes or pulls."""
        self._inbox.start(step)
        self._parameters.publish(self._fill, step)

    def start_thread(self) -> None:
        """Run the loop in a thread."""
        self._thread = threading.Thread(target=self._run_or_abort, daemon=True)
        self._thread.start()

    def _run_or_abort(self) -> None:
        try:
            self.run()
        except BaseException:
            # Without this thread every rank would wait for its update.
            report_and_abort(*sys.exc_info())

    def run(self) -> None:
        """Make updates until all ranks have left."""
        assert self.update is not None
        try:
            for step in itertools.count(self._parameters.version()):
                # Those who wait for an update have a limit; an idle server has none.
                deadline = Deadline(math.inf, f"{self._what}: update {step + 1}")
                with self._inbox.next(step, deadline) as flat, self._lock:
                    # Empty if a rank was admitted and then failed to write.
                    if grads := self._wire.read_gradients(flat):
                        self.update(grads)
                    self._parameters.publish(self._fill, step + 1)
        except EverybodyLeftError:
            return

    def _fill(self, flat: Array) -> None:
        self._wire.write_parameters(self.center, flat)

    def join(self, deadline: Deadline) -> None:
        """Wait until the thread has ended; all ranks have left by now.

        Raises:
            WaitTimeoutError: If its last updates take too long.
        """
        if self._thread is not None:
            deadline.block(self._has_ended, self._unfinished)

    def _has_ended(self, seconds: float) -> bool | None:
        assert self._thread is not None
        self._thread.join(seconds)
        return None if self._thread.is_alive() else True

    def _unfinished(self) -> str:
        step = self._parameters.version()
        lacks = self._inbox.awaited(step) or "the update itself"
        return f"the last updates of this rank, at step {step}, which waits for {lacks}"

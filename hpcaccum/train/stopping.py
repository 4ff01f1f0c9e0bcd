"""The early end of a run, on a signal or at a time limit, in step with all ranks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from hpcaccum.mpi import AtomicWords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum import Group

# The exit status of a run that can be continued: "try again later".
STOPPED = os.EX_TEMPFAIL
# SLURM sends the first at the end of a job, others on request (--signal).
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Whether any rank was asked to stop, and after which step all do. Collective.

    A rank is asked by one of `SIGNALS`, or by its clock.

    Args:
        group: The ranks.
        models: The number of models: one, or as many as shard groups.
        number: That of this rank's group.
        seconds: The time limit, from now on.
    """

    def __init__(
        self, group: Group, models: int, number: int, seconds: float = math.inf
    ) -> None:
        # Whether to stop; and for each group, the step after which its ranks do.
        self._words = AtomicWords(group, 0, 1 + models)
        self._place = 1 + number
        self._until = time.monotonic() + seconds
        self._signaled = self._known = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals to this process as requests during the block."""
        before = {each: signal.signal(each, self._note) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _note(self, *_: object) -> None:
        # No more: it may run between any two instructions.
        self._signaled = True

    def asked(self) -> bool:
        """Return whether any rank was asked; let the others know."""
        if not self._known:
            if self._signaled or time.monotonic() >= self._until:
                self._words.write(0, 1)
            self._known = bool(self._words.read(0))
        return self._known

    def is_after(self, step: int) -> bool:
        """Return whether all ranks of the group stop after ``step``.

        For ranks that make each step together, and call this after each of them. The
        first that knows of the request makes the next step the last one, before it
        contributes to it; so all others know when they have made that step.
        """
        if not self.asked():
            return False
        found = self._words.compare_and_swap(self._place, 0, step + 1)
        return step >= (found or step + 1)

    def free(self) -> None:
        """Free the memory. Collective."""
        self._words.free()

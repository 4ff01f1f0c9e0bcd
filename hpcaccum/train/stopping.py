"""The early end of a run, on a signal or at a time limit, in step with all ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from hpcaccum.mpi import AtomicWords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcaccum import Group

logger = logging.getLogger("hpcaccum")

# The exit status of a run that can be continued: "try again later".
STOPPED = os.EX_TEMPFAIL
# That of an interrupted one, by the convention of shells: do not start it again.
INTERRUPTED = 128 + signal.SIGINT
# SLURM sends SIGTERM at the end of a job, others on request (--signal).
_STATUS = {
    signal.SIGTERM: STOPPED,
    signal.SIGUSR1: STOPPED,
    signal.SIGINT: INTERRUPTED,
}
_NOTES = {
    STOPPED: "asked to stop: training ends here",
    INTERRUPTED: "interrupted: training ends here; Ctrl-C again ends the job at once",
}


class Requests:
    """The requests to this process to stop: its signals and its clock.

    Args:
        seconds: The time limit, which begins with `listening`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, math.inf
        self._signaled = 0

    def listen_early(self) -> None:
        """Take SIGUSR1 as a request from now on, which MPICH ignores after MPI_Init."""
        signal.signal(signal.SIGUSR1, self._note)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests during the block; a second Ctrl-C interrupts it.

        From then on SIGUSR1 is ignored: it would kill a complete training, whose job
        had failed then.
        """
        self._until = time.monotonic() + self._seconds
        before = {each: signal.signal(each, self._note) for each in _STATUS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        # No more: it may run between any two instructions.
        status = _STATUS[signal.Signals(number)]
        if status == self._signaled == INTERRUPTED:
            raise KeyboardInterrupt
        self._signaled = status

    @property
    def status(self) -> int:
        """The exit status for the request; 0 if there was none."""
        late = time.monotonic() >= self._until
        return self._signaled or (STOPPED if late else 0)


class Stop:
    """Whether any rank was asked to stop, and after which step all do. Collective.

    Args:
        group: The ranks.
        requests: Those to this rank.
        models: The number of models: one, or as many as shard groups.
        number: That of this rank's model.
        says: Whether this rank says that the training stops.
    """

    def __init__(
        self, group: Group, requests: Requests, models: int, number: int, says: bool
    ) -> None:
        # The exit status, if any was asked; and for each model, its last step.
        self._words = AtomicWords(group, 0, 1 + models)
        self._requests, self._place, self._says = requests, 1 + number, says
        self._status = 0

    def asked(self) -> bool:
        """Return whether any rank was asked; let the others know."""
        if not self._status:
            self._status = self._find()
            if self._status and self._says:
                logger.warning(_NOTES[self._status])
        return self._status != 0

    def _find(self) -> int:
        found = self._words.read(0)
        if not found and (mine := self._requests.status):
            # The first request counts.
            found = self._words.compare_and_swap(0, 0, mine) or mine
        return found

    @property
    def status(self) -> int:
        """The exit status; 0 if no rank was asked. It is final when all have ended."""
        return self._words.read(0)

    def is_after(self, step: int) -> bool:
        """Return whether all ranks of the group stop after ``step``.

        For ranks that make each step together, and call this before the first and after
        each of them. The first that knows of the request makes the next step the last
        one, before it contributes to that; so all others know when they have made it.
        """
        if not self.asked():
            return False
        found = self._words.compare_and_swap(self._place, 0, step + 1)
        return step >= (found or step + 1)

    def free(self) -> None:
        """Free the memory. Collective."""
        self._words.free()

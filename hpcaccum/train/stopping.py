"""The early end of a run, on a signal or at a time limit, in step with all ranks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from hpcaccum.nodes import words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hpcaccum import Group

logger = logging.getLogger("hpcaccum")

# The exit status of a run that can be continued: "try again later".
STOPPED = os.EX_TEMPFAIL
# That of an interrupted one, by the convention of shells: do not start it again.
INTERRUPTED = 128 + signal.SIGINT
# Seconds until SIGUSR1 counts. If a rank is lost, mpiexec of MPICH sends it, too; the
# heartbeat finds the loss within a second.
_WAIT = 2.0
_NOTES = {
    STOPPED: "asked to stop: training ends here",
    INTERRUPTED: "interrupted: training ends here; Ctrl-C again ends the job at once",
}


class Requests:
    """The requests to this process to stop: its signals and its clock.

    SLURM sends SIGTERM at the end of a job, and SIGUSR1 before that if it is asked to.
    SIGUSR1 at about the time of a loss is no request.

    The time limit, in seconds, begins with `listening`. ``lost`` has all ranks that are
    lost so far.
    """

    def __init__(self, seconds: float, lost: Collection[int] = ()) -> None:
        self._seconds, self._until, self._lost = seconds, math.inf, lost
        self._status = 0
        # When SIGUSR1 came, when a rank was lost, and how many were.
        self._asked, self._loss, self._known = math.inf, -math.inf, len(lost)

    def listen_early(self) -> None:
        """Note SIGUSR1 from now on, which MPICH ignores after MPI_Init."""
        signal.signal(signal.SIGUSR1, self._note)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals during the block; a second Ctrl-C interrupts it.

        From then on SIGUSR1 is ignored: it would kill a complete training, whose job
        had failed then.
        """
        self._until = time.monotonic() + self._seconds
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
        before = {each: signal.signal(each, self._note) for each in numbers}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        # No more: it may run between any two instructions.
        if number == signal.SIGUSR1:
            self._asked = time.monotonic()
        elif number == signal.SIGTERM:
            self._status = STOPPED
        elif self._status == INTERRUPTED:
            raise KeyboardInterrupt
        else:
            self._status = INTERRUPTED

    @property
    def status(self) -> int:
        """The exit status for the request; 0 if there was none."""
        now = time.monotonic()
        if len(self._lost) > self._known:
            self._known, self._loss = len(self._lost), now
        if self._asked < self._loss + _WAIT:
            self._asked = math.inf
        late = now >= min(self._until, self._asked + _WAIT)
        return self._status or (STOPPED if late else 0)


class Stop:
    """Whether any rank was asked to stop, and after which step all do. Collective."""

    def __init__(self, group: Group, requests: Requests, says: bool) -> None:
        # The exit status, if any was asked, and the last step.
        self._words = words_of(group, 0, 2)
        self._requests, self._says = requests, says
        self._status = 0

    def asked(self) -> bool:
        """Return whether any rank was asked; let the others know."""
        if not self._status:
            self._status = self.status
            if not self._status and (mine := self._requests.status):
                # The first request counts.
                self._status = self._words.compare_and_swap(0, 0, mine) or mine
            if self._status and self._says:
                logger.warning(_NOTES[self._status])
        return self._status != 0

    @property
    def status(self) -> int:
        """The exit status; 0 if no rank was asked. It is final when all have ended."""
        return self._words.read(0)

    def is_after(self, step: int) -> bool:
        """Return whether all ranks stop after ``step``.

        For ranks that make each step together, and call this before the first and after
        each of them. The first that knows of the request makes the next step the last
        one, before it contributes to that; so all others know when they have made it.
        """
        if not self.asked():
            return False
        found = self._words.compare_and_swap(1, 0, step + 1)
        return step >= (found or step + 1)

    def free(self) -> None:
        """Free the memory. Collective."""
        self._words.free()

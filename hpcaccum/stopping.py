"""The early end of a program: all ranks stop at the same step."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccum.arguments import seconds
from hpcaccum.errors import RESTART, InvalidArgumentError
from hpcaccum.mpi import Freeable, Group, group_of
from hpcaccum.nodes import words_of

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI
    from typing_extensions import Self

logger = logging.getLogger("hpcaccum")

# The exit status of a program that was interrupted, by the convention of shells.
INTERRUPTED = 128 + signal.SIGINT
# Seconds until SIGUSR1 counts. If a rank is lost, mpiexec of MPICH sends it, too; the
# heartbeat finds the loss within a second.
_WAIT = 2.0
_NOTES = {
    RESTART: "asked to stop: training ends here",
    INTERRUPTED: "interrupted: training ends here; Ctrl-C again ends the job at once",
}


class Stopping(Freeable):
    """Lets all ranks stop at the same step when one is asked to. Collective.

    A rank is asked by SIGTERM, by SIGUSR1, by Ctrl-C (SIGINT), or by its clock::

        with hpc.Stopping(time_limit="55m") as stop:
            while step < steps:
                ...
                if stop.agreed(step):
                    ...  # save
                    sys.exit(stop.status)

    In the block, signals do not interrupt the program; a second Ctrl-C does. SIGUSR1
    counts after 2 s, and not if a rank is lost meanwhile, because MPICH's ``mpiexec``
    sends it to the other ranks then. After the block it is ignored.

    If the block ends by ``sys.exit`` after a request, and not by Ctrl-C, rank 0 creates
    the file that the environment variable ``REQUEUE_FILE`` names, if it is set. The
    scripts of ``hpcaccum sbatch`` then queue the job again.

    Args:
        comm: Communicator of the ranks; COMM_WORLD by default.
        signals: Whether signals ask; must be False outside the main thread.
        time_limit: Time from the begin of the block: seconds, or a text such as
            ``"55m"``, ``"90s"`` or ``"2h"``. None is no limit.

    Raises:
        InvalidArgumentError: On every rank, if ``time_limit`` is invalid, or if signals
            are to be noted by another thread than the main thread.
    """

    def __init__(
        self,
        comm: mpi4py_MPI.Comm | Group | None = None,
        *,
        signals: bool = True,
        time_limit: str | float | None = None,
    ) -> None:
        self._group = group = group_of(comm)

        def check() -> float:
            if signals and threading.current_thread() is not threading.main_thread():
                raise InvalidArgumentError("only the main thread gets signals")
            return math.inf if time_limit is None else seconds(time_limit, "time_limit")

        limit = group.agree("Stopping", check, lambda _: {"signals": bool(signals)})
        self._requests = Requests(limit, group.lost, signals=signals)
        # The status, 0 if no rank was asked; and the step after which all stop.
        self._words = words_of(group, 0, 2, "Stopping")
        self._status = 0
        self._register(group, group.label("Stopping"))

    def __enter__(self) -> Self:
        """Begin to note signals, and the time limit."""
        self._requests.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """Note no more signals; see the class."""
        self._requests.end()
        stopped = isinstance(error[1], SystemExit) and self.status == RESTART
        if stopped and self._group.rank == 0 and not self._group.lost:
            ask_restart("")
        super().__exit__(*error)

    def agreed(self, step: int) -> bool:
        """Return whether this rank stops now. Not collective.

        Ranks that make each step together call it with the same steps, and get the same
        answers: True at most one step after the first rank was asked. With a parameter
        server ranks may pass ``opt.global_step``: each of them gets True as soon as the
        center has passed one more update.

        Args:
            step: Number of steps that are complete, at least 0. It never decreases.
        """
        self._check_open()
        if not self._asked():
            return False
        # The first rank that knows of the request makes the next step the last one,
        # before it contributes to that: so all others know when they have made it.
        last = self._words.compare_and_swap(1, 0, step + 1) or step + 1
        return step >= last

    def _asked(self) -> bool:
        """Return whether any rank was asked; let the others know."""
        if not self._status:
            self._status = self._words.read(0)
            if not self._status and (mine := self._requests.status):
                # The first request counts.
                self._status = self._words.compare_and_swap(0, 0, mine) or mine
            if self._status and self._group.rank == 0:
                logger.warning(_NOTES[self._status])
        return self._status != 0

    @property
    def status(self) -> int:
        """The exit status: 75 after a request, 130 after Ctrl-C, 0 if there was none.

        It is the same on all ranks when all have stopped.
        """
        return self._status if self._freed else self._words.read(0)

    def _free(self) -> None:
        self._status = self._words.read(0)
        self._words.free()

    def needs(self, rank: int) -> bool:
        """Whether a rank has the words."""
        return rank == 0


class Requests:
    """The requests to this process to stop: its signals, if they ask, and its clock.

    SLURM sends SIGTERM at the end of a job, and SIGUSR1 before if it is asked to. The
    clock asks ``limit`` seconds after `begin`; ``lost`` are all ranks that are lost.
    """

    def __init__(
        self, limit: float, lost: Collection[int] = (), *, signals: bool = True
    ) -> None:
        self._limit, self._until, self._lost = limit, math.inf, lost
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._status = 0
        # When SIGUSR1 came, when a rank was lost, and how many were.
        self._asked, self._loss, self._known = math.inf, -math.inf, len(lost)
        if signals:
            # From now on: MPICH ignores it after MPI_Init.
            signal.signal(signal.SIGUSR1, self._note)

    def begin(self) -> None:
        """Begin to note signals, and the time limit."""
        self._until = time.monotonic() + self._limit
        if self._signals:
            numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
            self._before = {each: signal.signal(each, self._note) for each in numbers}

    def end(self) -> None:
        """Restore what signals did before.

        From now on SIGUSR1 is ignored: it would kill a program whose work is complete.
        """
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if self._signals:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _note(self, number: int, _: object) -> None:
        # No more: it may run between any two instructions.
        if number == signal.SIGUSR1:
            self._asked = time.monotonic()
        elif number == signal.SIGTERM:
            self._status = RESTART
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
        return self._status or (RESTART if late else 0)


def ask_restart(word: str | None) -> None:
    """Tell the batch script whether its job is to be queued again when this run ends.

    It looks for the file that REQUEUE_FILE names, and not at the exit status: launchers
    do not report that reliably, and a rank that is killed has none. ``hpcaccum run``
    starts a run again in the same job if there is a word in the file: not if the run
    was asked to stop, which has the same status as the loss of a rank.
    """
    file = os.environ.get("REQUEUE_FILE")
    if file and word is not None:
        Path(file).write_text(word)
    elif file:
        Path(file).unlink(missing_ok=True)

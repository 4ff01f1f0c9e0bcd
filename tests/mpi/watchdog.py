"""End the job, with all stacks, when a rank does not get on."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from mpi4py import MPI

# Between two looks at whether another rank ends the job.
_LOOK = 0.5
# Each rank gets to show its stacks before the first one ends the job.
_GRACE = 2.0
# After that much more than its limit, C code shows the stacks of a process and ends it,
# if its threads cannot: one of them holds the interpreter lock.
_STUCK = 1.5
# The same for a process whose MPI_Abort hangs.
_LAST_RESORT = 10.0
# Launchers drop what they have not forwarded yet when a rank aborts.
_FORWARDING = 0.3
# Frames of the machinery between main() and the test say nothing.
_MACHINERY = ("/_pytest/", "/pluggy/", "/hypothesis/", "/pytest/__main__.py", "runpy")


class Watchdog:
    """A thread that waits for the limit of what is going on to pass.

    Args:
        after_failure: Seconds in which the other ranks must end a test that has failed
            on this one. They may wait for it in a collective call, without end.
        stderr: File descriptor that pytest does not capture.
        flag: A file that a rank makes when it ends the job, so that the others show
            their stacks, too. A message of MPI would not do: looking for it makes
            progress, without which tests must pass.
        last_words: Gives what this rank should still say before the job ends.
    """

    def __init__(
        self,
        after_failure: float,
        stderr: int,
        flag: Path,
        last_words: Callable[[], str],
    ) -> None:
        self._after_failure = after_failure
        self._stderr, self._flag = stderr, flag
        self._last_words = last_words
        self._changed = threading.Condition()
        self._failure = ""  # this rank's last one in what is going on
        self.what = ""
        self._seconds = 0.0
        self._deadline: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def armed(self) -> bool:
        return self._deadline is not None

    def arm(self, what: str, seconds: float) -> None:
        """Give ``what`` that many seconds; 0 is no limit."""
        self.disarm()
        self._failure = ""
        if seconds > 0:
            self._start(what, seconds)

    def _start(self, what: str, seconds: float) -> None:
        faulthandler.dump_traceback_later(
            seconds + _STUCK, exit=True, file=self._stderr
        )
        with self._changed:
            self.what, self._seconds = what, seconds
            self._deadline = time.monotonic() + seconds
            self._changed.notify()

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with self._changed:
            self._deadline = None
            self._changed.notify()

    @contextlib.contextmanager
    def failing(self, failure: str) -> Iterator[None]:
        """Wait here for the other ranks to hear of this rank's failure, not for long.

        Nothing happens if ``failure`` is empty. The limit of the test stays: hypothesis
        looks for smaller examples, of which each may fail by a timeout.
        """
        if not failure or self._deadline is None:
            yield
            return
        seconds, end = self._seconds, self._deadline
        self._failure = failure
        self._start(self.what, min(seconds, self._after_failure))
        yield
        self._start(self.what, max(0.0, end - time.monotonic()))
        self._seconds = seconds

    def say(self, text: str) -> None:
        """Print ``text``, with the rank, on the real stderr."""
        rank = MPI.COMM_WORLD.rank
        lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
        os.write(self._stderr, f"\n{lines}".encode())

    def end_job(self, message: str) -> None:
        """Say ``message`` on the real stderr and end all ranks."""
        self.say(message)
        time.sleep(_FORWARDING)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def _watch(self) -> None:
        with self._changed:
            while (problem := self._problem()) is None:
                left = self._left()
                self._changed.wait(left if left is None else min(left, _LOOK))
        faulthandler.dump_traceback_later(_LAST_RESORT, exit=True, file=self._stderr)
        with contextlib.suppress(OSError):  # a rank on another host has none
            self._flag.touch()
        # Not at once: the lines of two ranks may mix.
        time.sleep(0.1 * MPI.COMM_WORLD.rank)
        self.say("\n".join([problem, stacks(), self._failure, self._last_words()]))
        time.sleep(_GRACE)
        self.end_job("ending the job")

    def _problem(self) -> str | None:
        """Say why the job must end; None if it goes on."""
        left = self._left()
        if left is None:
            return None
        if left <= 0:
            return f"no progress in {self._seconds:g} s: {self.what}"
        # A rank whose own limit is near says that instead.
        if left > _LOOK and self._flag.exists():
            return f"another rank ends the job, this one is in {self.what}"
        return None

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()


# That of this rank's test run.
own: Watchdog | None = None


@contextlib.contextmanager
def failing(failure: str | None) -> Iterator[None]:
    """Do as `Watchdog.failing`, in a test run; programs that tests start have none."""
    with own.failing(failure or "") if own else contextlib.nullcontext():
        yield


def stacks() -> str:
    """Return the stacks of all threads but the one that asks."""
    # Python 3.11 may deadlock if it collects garbage in the next call (gh-106883).
    gc.disable()
    frames = sys._current_frames()
    gc.enable()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames.pop(threading.get_ident())
    return "\n".join(
        f"thread {names.get(ident, ident)}, most recent call last:\n{_stack(frame)}"
        for ident, frame in frames.items()
    )


def _stack(frame: FrameType) -> str:
    summary = traceback.extract_stack(frame)
    shown = [f for f in summary if not any(part in f.filename for part in _MACHINERY)]
    return "".join(traceback.format_list(shown or summary))

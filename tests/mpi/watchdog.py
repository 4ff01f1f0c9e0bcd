"""End the job, with all stacks, when a rank does not get on."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from mpi4py import MPI

# All ranks reach their limit at about the same time; each gets to show its stacks.
_GRACE = 2.0
# After that much more, C code ends the process that Python cannot: one that holds
# the interpreter lock, or whose MPI_Abort hangs.
_LAST_RESORT = 10.0
# Launchers drop what they have not forwarded yet when a rank aborts.
_FORWARDING = 0.3
# Frames of the machinery between main() and the test say nothing.
_MACHINERY = ("/_pytest/", "/pluggy/", "/hypothesis/", "/pytest/__main__.py", "runpy")


class Watchdog:
    """A thread that waits for the limit of what is going on to pass.

    Args:
        stderr: File descriptor that pytest does not capture.
        last_words: Gives what this rank should still say before the job ends.
    """

    def __init__(self, stderr: int, last_words: Callable[[], str]) -> None:
        self._stderr = stderr
        self._last_words = last_words
        self._changed = threading.Condition()
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
        if seconds <= 0:
            return
        faulthandler.dump_traceback_later(
            seconds + _LAST_RESORT, exit=True, file=self._stderr
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
            while True:
                left = self._left()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        # Not at once: the lines of two ranks may mix.
        time.sleep(0.1 * MPI.COMM_WORLD.rank)
        problem = f"no progress in {self._seconds:g} s: {self.what}"
        self.say("\n".join([problem, stacks(), self._last_words()]))
        time.sleep(_GRACE)
        self.end_job("ending the job")

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()


def stacks() -> str:
    """Return the stacks of all threads but the one that asks."""
    frames = sys._current_frames()
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

"""The time limit of a call, and every wait of the package.

A public call makes one `Deadline` and hands it down. Everything that waits for
others calls `Deadline.wait` (to poll), `Deadline.block` (for a call that blocks) or
`Deadline.join`. So each wait has a limit and warnings, and a trace can show it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hpcaccum.errors import InvalidArgumentError, LostRankError, WaitTimeoutError
from hpcaccum.spans import Label, clock, recording

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")

# A wait without a limit is never silent: a warning names the missing ranks after this
# many seconds, then after twice as many, and so on.
FIRST_WARNING = 60.0

# For this long no nap is taken between two looks. Another rank answers within
# microseconds, but even a nap of 0 s takes some 70 us. So no wait takes much more than
# three times as long as necessary. Yielding leaves the core to other ranks, which may
# be more than there are cores.
EAGER = 200e-6
# Naps are a part of the time waited so far, to which the kernel adds some 50 us. With
# naps of 20 us, 8 ranks that waited took a quarter of the time of two cores; with a
# quarter of the wait, a step of two ranks on cores of their own took longer.
_PART, _SHORT_NAP = 1 / 16, 200e-6
# After 20 ms the part is smaller: a server that is idle takes the interpreter from
# other threads at each look. Naps become longer until nothing is noticed of idle ones:
# two on each of 4 ranks, with naps of 0.3 ms, made all else on 2 cores take twice as
# long.
_SMALL_PART, _LONGEST_NAP = 1 / 100, 5e-3
# MPI moves data when it is called; where it copies them itself, some 10 KB at a time.
# Naps that grew with the wait made the time of a reduction grow with its square.
MOVING_NAP = 20e-6

_SPAN = Label("wait", "Deadline.wait")
# Seconds of a wait after which a trace asks what is missing, for the first time. The
# answer may be a round trip to another node.
_FIRST_QUESTION = 1e-3

# Seconds for which a call may block before it is looked whether all waits end.
_LOOK = 0.25
# Seconds to wait for an answer that usually is on its way, after an interruption or the
# end of a limit, or for a message. A user who presses Ctrl-C must get the program back.
_GRACE = 1.0


# What limits the waits that a thread begins, if anything: its attribute ``outer``.
_limits = threading.local()
# The deadlines of threads that wait, by the thread's identifier.
_waits: dict[int, Deadline] = {}
# Why no wait of this process can succeed any more, if so.
_reasons: list[str] = []


def current_wait(thread: int | None) -> Deadline | None:
    """Return the deadline in whose innermost wait a thread is, None if in none."""
    return _waits.get(thread or 0)


def end_waits(reason: str) -> None:
    """Have all waits of this process, and all later ones, raise LostRankError."""
    _reasons.append(reason)


def reason_to_end() -> str | None:
    """Return why all waits end; None if they do not."""
    return _reasons[0] if _reasons else None


def nap_after(waited: float) -> float:
    """Return how long to nap between two looks, after so many seconds of waiting."""
    # Without calls, as all that wait do this again and again.
    nap, least = _PART * waited, _SMALL_PART * waited
    if nap > _SHORT_NAP:
        nap = least if least > _SHORT_NAP else _SHORT_NAP
    return nap if nap < _LONGEST_NAP else _LONGEST_NAP


def grace(what: object) -> Deadline:
    """Return the limit of a wait for an answer that usually is on its way."""
    return Deadline(_GRACE, what)


class Deadline:
    """The time limit of one public call.

    A ``timeout`` of 0 looks once; None is the environment's HPCACCUM_TIMEOUT, or no
    limit. ``what`` is the call, as the user knows it; it begins every message, and its
    ``str`` is taken only then. `waited` are the seconds spent in `wait` and `block` so
    far. A wait that is over at the first look adds nothing.
    """

    def __init__(self, timeout: float | None, what: object) -> None:
        self.what, self.waited = what, 0.0
        self._begun = time.monotonic()
        self._limit = _seconds(timeout)
        if (outer := getattr(_limits, "outer", None)) is not None:
            self.what, self._limit = outer.what, min(self._limit, outer.remaining)
        self._next_warning = FIRST_WARNING

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._begun

    @property
    def remaining(self) -> float:
        """Seconds left, at least 0; infinite without a limit."""
        return max(0.0, self._limit - self.elapsed)

    @property
    def expired(self) -> bool:
        """Whether the limit has passed."""
        return self.elapsed >= self._limit

    def wait(
        self,
        ready: Callable[[], T | None],
        missing: Callable[[], str],
        *,
        moves_data: bool = False,
    ) -> T:
        """Call ``ready`` until it returns something other than None; return that.

        It is called at least once, even if the limit has passed, and raises if the wait
        cannot succeed. ``missing`` returns what is waited for, and which ranks; it is
        called for messages and traces only. If data move in ``ready`` and nowhere else,
        as in a test of MPI's requests, ``moves_data`` keeps naps short.

        Raises WaitTimeoutError if the limit passes first, and LostRankError if a rank
        is lost without which the job cannot go on.
        """
        result = ready()
        if result is not None:
            return result
        begun = self.elapsed

        def look(seconds: float) -> T | None:
            waited = self.elapsed - begun
            if waited < EAGER:
                os.sched_yield()
            else:
                nap = MOVING_NAP if moves_data else nap_after(waited)
                time.sleep(min(nap, seconds))
            return ready()

        return self._repeat(look, missing)

    def block(
        self, attempt: Callable[[float], T | None], missing: Callable[[], str]
    ) -> T:
        """Do as `wait` with a call that blocks: of a lock, or of a thread.

        ``attempt`` gets the seconds for which it may block, 0 at first.
        """
        result = attempt(0.0)
        if result is not None:
            return result
        return self._repeat(lambda seconds: attempt(min(seconds, _LOOK)), missing)

    def _repeat(
        self, attempt: Callable[[float], T | None], missing: Callable[[], str]
    ) -> T:
        """Repeat an attempt that has failed; it gets the seconds that it may take."""
        recorder, shown, begin = recording(), dict[str, str](), clock()
        begun, due, result = self.elapsed, 0.0, None
        question = begun + _FIRST_QUESTION if recorder else math.inf
        _waits[threading.get_ident()] = self
        try:
            while result is None:
                if _reasons:
                    raise LostRankError(f"{self.what}: {_reasons[0]}")
                elapsed = self.elapsed
                if elapsed >= due:
                    self._check_limit(missing)
                    self._warn(missing)
                    if elapsed >= question:
                        shown["for"] = self._shown(missing)
                        # Again when the wait is twice as long.
                        question = 2 * self.elapsed - begun
                    due = min(self._limit, self._next_warning, question)
                result = attempt(max(0.0, due - elapsed))
            return result
        finally:
            # A wait in another one has removed it already. To restore the outer one
            # would restore what an interrupted wait has left there, too.
            _waits.pop(threading.get_ident(), None)
            self.waited += self.elapsed - begun
            if recorder is not None:
                recorder.add(_SPAN, begin, clock(), {"call": str(self.what), **shown})

    def acquire(self, lock: Any, missing: Callable[[], str]) -> None:
        """Acquire a lock, which the caller releases."""
        self.block(lambda seconds: lock.acquire(timeout=seconds) or None, missing)

    def join(self, thread: threading.Thread, missing: Callable[[], str]) -> None:
        """Wait until a thread has ended."""

        def attempt(seconds: float) -> bool | None:
            thread.join(seconds)
            return None if thread.is_alive() else True

        self.block(attempt, missing)

    def extended(self) -> Deadline:
        """Return the limit of what is looked at once, also if no time is left."""
        return Deadline(max(self.remaining, _GRACE), self.what)

    @contextlib.contextmanager
    def limits(self) -> Iterator[None]:
        """Let waits that this thread begins in the block be part of this one."""
        before, _limits.outer = getattr(_limits, "outer", None), self
        try:
            yield
        finally:
            _limits.outer = before

    def ask(self, missing: Callable[[], str]) -> str:
        """Return what is waited for; who does not answer, if others must be asked."""
        try:
            with grace(self.what).limits():
                return missing()
        except WaitTimeoutError as error:
            return error.missing

    def _check_limit(self, missing: Callable[[], str]) -> None:
        if self.expired:
            text = self.ask(missing)
            error = WaitTimeoutError(self._message(text))
            error.missing = text
            raise error

    def _warn(self, missing: Callable[[], str]) -> None:
        if self.elapsed > self._next_warning:
            logger.warning("%s", self._message(self.ask(missing)))
            self._next_warning *= 2

    def _shown(self, missing: Callable[[], str]) -> str:
        try:
            return self.ask(missing)
        except Exception as error:
            # The wait itself goes on.
            return f"unknown ({type(error).__name__})"

    def _message(self, missing: str) -> str:
        return f"{self.what}: waited {self.elapsed:.3g} s for {missing}"


class Wake:
    """Lets one thread nap until another one wakes it.

    A signal handler may raise in any call and leaves nothing locked. That is not so
    with `threading.Event` and `threading.Condition`, which run Python code while they
    hold a lock: all other threads would wait for that lock without end.
    """

    def __init__(self) -> None:
        # Free: the next nap is over at once.
        self._lock = threading.Lock()
        self._lock.acquire()

    def nap(self, seconds: float) -> bool:
        """Return whether `wake` is called in this time, or was since the last nap."""
        return self._lock.acquire(timeout=seconds)

    def wake(self) -> None:
        """End the nap, or the next one."""
        # It is free already if nobody has napped since the last call.
        with contextlib.suppress(RuntimeError):
            self._lock.release()


class Waiting:
    """Waits for what changes in memory that ranks share.

    If another thread of this rank makes or sees the change, the waits block until it
    calls `wake` or `look`: if they polled, they would take the interpreter from it.
    """

    def __init__(self, *, blocks: bool) -> None:
        self._blocks = blocks
        # Those that block. The lock is held during `look`: what a fact reads may be
        # freed after the wait. Reentrant, for a signal handler that waits.
        self._waits: list[tuple[Callable[[], bool], Wake]] = []
        self._lock = threading.RLock()

    def wait(
        self,
        fact: Callable[[], bool],
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until something is true; if it polls, call ``meanwhile`` in between."""

        def found() -> bool | None:
            if fact():
                return True
            if meanwhile is not None:
                meanwhile()
            return None

        if not self._blocks:
            deadline.wait(found, missing)
            return
        woken = Wake()

        def attempt(seconds: float) -> bool | None:
            if not fact():
                woken.nap(seconds)
            return fact() or None

        with self._lock:
            self._waits.append((fact, woken))
        try:
            deadline.block(attempt, missing)
        finally:
            with self._lock:
                self._waits.remove((fact, woken))

    def look(self) -> None:
        """Wake those that wait for something that is true now."""
        with self._lock:
            for fact, woken in self._waits:
                if fact():
                    woken.wake()

    def wake(self) -> None:
        """Wake all of them, which look themselves: a fact may do more than look."""
        for _, woken in list(self._waits):
            woken.wake()


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return limit_of_environment("HPCACCUM_TIMEOUT", math.inf)
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(
            f"timeout must be a number of seconds or None, got {type(timeout).__name__}"
        )
    if not timeout >= 0:
        raise InvalidArgumentError(f"timeout must be at least 0 s, got {timeout}")
    return float(timeout)


def limit_of_environment(variable: str, default: float) -> float:
    """Return the seconds above 0 that a variable of the environment contains."""
    text = os.environ.get(variable, "")
    try:
        limit = float(text) if text else default
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise InvalidArgumentError(
            f"{variable} must be a number of seconds above 0, got {text!r}"
        )
    return limit

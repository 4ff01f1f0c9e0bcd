"""Waiting: one `Deadline` is made at the public call and handed down."""

from __future__ import annotations

import logging
import math
import numbers
import os
import time
from typing import TYPE_CHECKING, TypeVar

from hpcaccum.errors import InvalidArgumentError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("hpcaccum")

T = TypeVar("T")

# A wait that has no limit is never silent: who is missing is said after this many
# seconds, then after twice as many, and so on.
FIRST_WARNING = 60.0

# How long to look again at once. Another rank's answer takes microseconds, a nap, be it
# of 0 s, some 70 us; so no wait takes much more than three times as long as it must. In
# between the core goes to whoever needs it: ranks may be more than cores.
_EAGER = 200e-6
# Naps are short: a collective of several rounds waits for one after the other.
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 200e-6


class Deadline:
    """The time limit of one public call, and what that call is for.

    Args:
        timeout: Seconds; 0 looks once; None is the environment's HPCACCUM_TIMEOUT, or
            no limit.
        what: The call, as the user knows it; begins every message.
    """

    def __init__(self, timeout: float | None, what: str) -> None:
        self.what = what
        self._begun = time.monotonic()
        self._limit = _seconds(timeout)
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
        """Whether the limit is over."""
        return self.elapsed >= self._limit

    def wait(self, ready: Callable[[], T | None], missing: Callable[[], str]) -> T:
        """Call ``ready`` until it gives something other than None; return that.

        Args:
            ready: Looked at once at least, also when the time is over.
            missing: Says what is waited for, and who; called for messages only.

        Raises:
            WaitTimeoutError: If the limit passes first.
        """
        result = ready()
        begun, naps = time.monotonic(), 0
        while result is None:
            if self.expired:
                raise WaitTimeoutError(self._message(missing()))
            if time.monotonic() - begun < _EAGER:
                os.sched_yield()
            else:
                self._warn(missing)
                time.sleep(self._nap(naps))
                naps += 1
            result = ready()
        return result

    def _warn(self, missing: Callable[[], str]) -> None:
        if self.elapsed > self._next_warning:
            logger.warning("%s", self._message(missing()))
            self._next_warning *= 2

    def _nap(self, before: int) -> float:
        doubled = _SHORTEST_NAP * 2 ** min(before // 8, 16)
        return min(float(doubled), _LONGEST_NAP, self.remaining)

    def _message(self, missing: str) -> str:
        return f"{self.what}: waited {self.elapsed:.3g} s for {missing}"


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return _environment_limit()
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(
            f"timeout must be seconds or None, got {type(timeout).__name__}"
        )
    if not timeout >= 0:
        raise InvalidArgumentError(f"timeout must be at least 0 s, got {timeout}")
    return float(timeout)


def _environment_limit() -> float:
    text = os.environ.get("HPCACCUM_TIMEOUT", "")
    try:
        limit = float(text) if text else math.inf
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise InvalidArgumentError(f"HPCACCUM_TIMEOUT must be seconds, got {text!r}")
    return limit

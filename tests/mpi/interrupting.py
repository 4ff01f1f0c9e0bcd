"""A signal handler that raises, at every point of a call at which Python may run it.

Python runs handlers between its own instructions: after a call, at the start of a
function and when a loop goes back. A trace function sees each of these instructions
before it is executed, and makes the signal pending then. The handler runs where Python
runs it, as if the signal had come from outside at this moment.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from mpi4py import MPI

import hpcaccum

_SIGNAL = int(signal.SIGVTALRM)
_OURS = hpcaccum.__path__[0]
# An instruction is a point so many times in a call of its function. A loop that goes on
# mostly waits, and the number of points must not depend on how long.
_VISITS = 5
# Points that all runs try, if not left out by number: a short call has no more.
_FIRST = 60
# Python 3.12 traces no instructions unless a frame asked for it before settrace.
sys._getframe().f_trace_opcodes = True


class Interrupted(BaseException):
    """What the handler raises."""


class _Fire:
    """Raises the signal when something is added to it.

    Neither an addition nor the function of C that it calls is a point at which Python
    runs handlers; those of the trace function are over by then.
    """

    __add__ = ctypes.PyDLL(None)["raise"]


_FIRE = _Fire()


class _Shot:
    def __init__(self, number: int) -> None:
        self._left = number
        # Whether the innermost function that is traced repeats itself.
        self._repeats = False

    @property
    def fired(self) -> bool:
        return self._left <= 0

    def enter(self, frame: Any, event: str, arg: Any) -> Any:
        """Trace the functions of the package, but not those that a wait repeats."""
        if self._repeats or not frame.f_code.co_filename.startswith(_OURS):
            return None
        visits: Counter[int] = Counter()

        def look(frame: Any, event: str, arg: Any) -> Any:
            if event == "opcode":
                visits[frame.f_lasti] += 1
                if self._is_last(frame, visits[frame.f_lasti]):
                    # First: the next call of this function would be a point too.
                    sys.settrace(None)
                    # At the end: Python 3.10 would run handlers after a call in here.
                    return _FIRE + _SIGNAL
            return look

        # In this order: Python 3.13 traces instructions of frames that have a function.
        frame.f_trace = look
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return look

    def _is_last(self, frame: Any, visit: int) -> bool:
        """Count where a function is, if it is a point; return if it is the last."""
        self._repeats = visit > _VISITS
        if self._repeats or frame.f_lasti not in _points(frame.f_code):
            return False
        self._left -= 1
        return self._left == 0


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    names = ("CALL", "RESUME", "BACKWARD", "JUMP_ABSOLUTE")
    return frozenset(
        each.offset
        for each in dis.get_instructions(code)
        if any(name in each.opname for name in names)
    )


def interrupt(
    do: Callable[[], Any], number: int, act: Callable[[], Any] | None = None
) -> bool:
    """Call something that is interrupted at one point; return whether it has so many.

    What it raises besides is lost.

    Args:
        do: The call.
        number: Of the point.
        act: What the signal handler calls; by default it raises `Interrupted`.
    """

    def handler(number: int, frame: Any) -> None:
        if act is None:
            raise Interrupted
        act()

    shot, tracing = _Shot(number), sys.gettrace()
    before = signal.signal(_SIGNAL, handler)
    # A collection calls functions of others, in which the handler may run; what it
    # raises there is only printed.
    collects = gc.isenabled()
    gc.disable()
    try:
        sys.settrace(shot.enter)
        do()
    except (Interrupted, Exception):
        """As intended."""
    finally:
        sys.settrace(tracing)
        signal.signal(_SIGNAL, before)
        if collects:
            gc.enable()
    return shot.fired


def points(every: int) -> Iterator[int]:
    """Count by so many, from where no run on fewer ranks has begun.

    So runs on 1, 2, 3, ... ranks together try all. After the first ones, those on
    several ranks share them once more: runs on 2, 3 and 4 ranks with one MPI, and runs
    with three MPIs on one number of ranks. The points are in Python, and the same with
    each MPI.
    """
    size, share = MPI.COMM_WORLD.size, _mpi()
    for turn, number in enumerate(itertools.count(1 + size % every, every)):
        if size == 1 or number <= _FIRST or (turn + size + share) % 3 == 0:
            yield number


def _mpi() -> int:
    """Return which of three MPIs this is: tests run with each."""
    if MPI.get_vendor()[0] == "Open MPI":
        return 2
    return int(os.environ.get("MPIR_CVAR_NOLOCAL") == "1")


def at_each_point(trial: Callable[[int], tuple[bool, Any]], every: int = 1) -> set[Any]:
    """Interrupt a call at point 1, 2, 3, ... until it has no more; return the results.

    Args:
        every: Only at each of so many `points`.
        trial: Gets the number of the point, for `interrupt`; returns whether there are
            more, and what came of it.
    """
    seen = set()
    for number in points(every):
        try:
            more, result = trial(number)
        except Exception as error:
            raise AssertionError(f"at point {number}: {error!r}") from error
        seen.add(result)
        if not more:
            break
    # The fewest are 7, with Python 3.10.
    assert number > 5, "there must be something to interrupt"
    return seen

"""One reduction as a schedule sees it, and what schedules on a node have in common."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcaccum.device import copyto
from hpcaccum.overlap import overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]
Wait = Callable[[Callable[[], bool]], None]

NOTHING: Mapping[str, Array] = {}
# Bits of a signature in a word that also says how far a rank is.
BITS = 24
SIGNATURES = 1 << BITS


class Quiet:
    """Calls functions without warnings of infinities, which are for the user to see.

    `numpy.errstate` does the same, and costs a microsecond each time.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._modern = int(np.__version__.split(".")[0]) >= 2
        if self._modern:
            self._context.run(np.seterr, all="ignore")

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        """Call it."""
        if self._modern:
            self._context.run(function, *args)
        else:
            with np.errstate(all="ignore"):
                function(*args)


class Call(NamedTuple):
    """One reduction, as this rank makes it.

    Attributes:
        signature: Must be the same on all ranks.
        wait: Waits for long.
        brought: Arrays to copy in.
        whole: Whether they are all that this rank brings, none lies there already.
        out: Arrays to copy results to.
        ready: Waits until a bucket of this rank's arrays, by its number, is there; they
            are asked for in order. None if all are.
        arrived: Is told the number of each bucket whose results are there, in order.
        buffer: Device memory, flat, to be summed in place instead of all other; only
            for the schedule that gives it to MPI.
    """

    signature: int
    wait: Wait
    brought: Mapping[str, Array]
    whole: bool
    out: Mapping[str, Array]
    ready: Callable[[int], None] | None = None
    arrived: Callable[[int], None] | None = None
    buffer: Any = None

    def tell(self, count: int) -> None:
        """Say that the results of the first ``count`` buckets are there."""
        if self.arrived is not None:
            for number in range(count):
                self.arrived(number)


def copy(source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
    """Copy arrays to others of the same names, with conversion."""
    for name in target if len(target) < len(source) else source:
        here, there = source[name], target[name]
        if type(here) is type(there):
            there[...] = here
        else:
            copyto(there, here)


def copy_in(
    brought: Mapping[str, Array], arrays: Mapping[str, Array], memory: Array
) -> None:
    """Copy what a caller brought to a schedule's arrays, all of which are ``memory``.

    It may itself lie there: then it is read before any array is written, also if it
    is a single one: NumPy 2.4 gets ``x[512:1012] = x[250:1250:2]``
    wrong.
    """
    share, plain = np.may_share_memory, np.ndarray
    for name, array in brought.items():
        if (type(array) is not plain or share(array, memory)) and overlap(
            array, memory
        ):
            brought = {**brought, name: array.copy()}
    copy(brought, arrays)


def agree(words: Sequence[int], mine: int) -> bool:
    """Whether all signatures are mine, in words that are not behind mine.

    A rank that is ahead went on because they were.
    """
    return all(word == mine or word >> BITS > mine >> BITS for word in words)

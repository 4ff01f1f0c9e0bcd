"""A lock that an exception of a signal handler cannot leave locked."""

from __future__ import annotations

import functools
from _thread import RLock
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Lock(RLock):  # type: ignore[misc]
    """A reentrant lock, for `with` only.

    Python 3.14 runs signal handlers between the call that acquires a lock and the body
    of `with`. An exception of a handler then leaves a lock of `threading` locked, and
    all that need it wait without end. Here the call is a function of Python, after
    whose return no handler runs.
    """

    __slots__ = ()

    def __enter__(self) -> bool:  # type: ignore[override]
        # Acquired in C by the iterator, after which no handler runs either.
        [acquired] = map(self.acquire, (True,))
        return acquired


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``make`` once, also if several threads call it."""
    lock, cached = Lock(), functools.cache(make)

    @functools.wraps(make)
    def made() -> T:
        with lock:
            return cached()

    return made

"""The events of one rank, in one list per thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Events that a rank keeps; one takes some 300 bytes.
MOST = 1_000_000

# One clock for all processes of a node.
clock = time.monotonic


class Label(NamedTuple):
    """The name of a span, and where it comes from."""

    name: str
    category: str


class Event(NamedTuple):
    """A span. Times are those of `clock`."""

    label: Label
    begin: float
    end: float
    args: Mapping[str, Any] | None


class _Row(threading.local):
    """The events of the current thread."""

    def __init__(self, threads: list[tuple[str, list[Event]]]) -> None:
        thread = threading.current_thread()
        is_main = thread is threading.main_thread()
        self.events: list[Event] = []
        threads.append(("" if is_main else thread.name, self.events))


class Recorder:
    """Keeps the events of this rank's threads.

    Attributes:
        most: How many it keeps.
    """

    def __init__(self) -> None:
        self._threads: list[tuple[str, list[Event]]] = []
        self._row = _Row(self._threads)
        # Several threads take numbers from it; `next` is one step of the interpreter.
        self._numbers, self._limit = itertools.count(), MOST
        self.most = MOST

    def add(
        self, label: Label, begin: float, end: float, args: Mapping[str, Any] | None
    ) -> None:
        """Keep an event of this thread, or count it only."""
        if next(self._numbers) < self._limit:
            self._row.events.append(Event(label, begin, end, args))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the spans of `span` during the block."""
        global _running
        _running = self
        try:
            yield
        finally:
            _running = None

    def rows(self) -> dict[str, list[Event]]:
        """Return copies of the events by the name of their thread, "" for the main one.

        Threads with the same name have one row.
        """
        found: dict[str, list[Event]] = {"": []}
        for name, events in list(self._threads):
            found.setdefault(name, []).extend(events)
        return found

    def left_out(self) -> int:
        """Return how many events were not kept. No event is kept afterwards."""
        self._limit = 0
        return max(0, next(self._numbers) - self.most)


_running: Recorder | None = None


def is_running() -> bool:
    """Whether this process records a trace."""
    return _running is not None


@contextlib.contextmanager
def span(name: str, /, **args: Any) -> Iterator[None]:
    """Show a block of the program in the trace that is running, if there is one.

    Args:
        name: Of the span, in the row of this thread.
        args: Shown with it.
    """
    recorder, begin = _running, clock()
    try:
        yield
    finally:
        if recorder is not None:
            recorder.add(Label(name, "program"), begin, clock(), args)

"""Spans: what a rank does, and when; recorded only while a trace is running.

A method is marked with `traced` where it is defined. It stays as it is: a trace
replaces the marked methods by wrappers when it begins, and puts them back at its end.
So without a trace no call is slower. No object may keep a marked method bound.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

# From the positional arguments and the result to what is shown with the span.
Describe = Callable[[tuple[Any, ...], Any], Mapping[str, Any]]
Function = Callable[..., Any]

F = TypeVar("F", bound=Function)

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
    """Keeps the events of this rank's threads, `most` of them."""

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


def recording() -> Recorder | None:
    """Return the recorder of the trace that is running, if there is one."""
    return _running


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


# Marked methods


def _calls(
    function: Function, label: Label, describe: Describe | None, recorder: Recorder
) -> Function:
    """Return a function that records each call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            recorder.add(label, begin, clock(), {"error": type(error).__name__})
            raise
        end = clock()
        recorder.add(label, begin, end, describe and describe(args, result))
        return result

    return call


def _steps(
    function: Function, label: Label, describe: Describe | None, recorder: Recorder
) -> Function:
    """Return a generator that records one span, which other steps may overlap."""

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[bool, None, Any]:
        begin = clock()
        result = yield from function(*args, **kwargs)
        end = clock()
        recorder.add(label, begin, end, describe and describe(args, result))
        return result

    return generate


class Mark(NamedTuple):
    """A marked method, the label of its spans, and what describes each of them."""

    function: Function
    label: Label
    describe: Describe | None


MARKED: list[Mark] = []


def traced(name: str, describe: Describe | None = None) -> Callable[[F], F]:
    """Mark a method whose calls are shown as spans; a generator is one call.

    ``describe`` is called with the positional arguments and the result; it returns what
    is shown with the span.
    """

    def mark(function: F) -> F:
        label = Label(name, function.__qualname__)
        MARKED.append(Mark(function, label, describe))
        return function

    return mark


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Record spans, waits and the calls of all marked methods during the block."""
    global _running
    _running = recorder
    with contextlib.ExitStack() as undo:
        for mark in MARKED:
            function = mark.function
            path, _, method = function.__qualname__.rpartition(".")
            owner = operator.attrgetter(path)(sys.modules[function.__module__])
            wrap = _steps if inspect.isgeneratorfunction(function) else _calls
            undo.callback(setattr, owner, method, function)
            setattr(owner, method, wrap(*mark, recorder))
        try:
            yield
        finally:
            _running = None

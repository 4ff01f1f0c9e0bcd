"""Spans: what a rank does, and when; recorded only while a trace is running.

A method is marked with `traced` where it is defined. It stays as it is: a trace
replaces the marked methods by wrappers when it begins, and puts them back at its end.
So without a trace no call is slower. No object may keep a marked method bound.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    # From the positional arguments and the result to what is shown with the span.
    Describe = Callable[[tuple[Any, ...], Any], Mapping[str, Any]]
    Function = Callable[..., Any]

F = TypeVar("F", bound="Function")

# Seconds of a wait after which it is asked what is missing, for the first time. The
# answer may be a round trip to another node.
_PATIENCE = 1e-3
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


# Wrappers


def calls(
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


def steps(
    function: Function, label: Label, describe: Describe | None, recorder: Recorder
) -> Function:
    """Return a function that records when the steps of an agent began and ended.

    Other steps run in between, so these spans may overlap.
    """

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[bool, None, Any]:
        begin = clock()
        result = yield from function(*args, **kwargs)
        end = clock()
        recorder.add(label, begin, end, describe and describe(args, result))
        return result

    return generate


class _Wait:
    """A wait that goes on, and what it was for when that was last asked.

    Attributes:
        args: What is shown of it.
    """

    def __init__(self, missing: Callable[[], str]) -> None:
        self._missing, self._begin, self._patience = missing, clock(), _PATIENCE
        self.args: dict[str, str] = {}

    @property
    def patience(self) -> float:
        """Seconds until what is missing is asked again."""
        return max(0.0, self._begin + self._patience - clock())

    def ask(self) -> None:
        """Ask what is missing, whenever the wait has become twice as long."""
        if self.patience:
            return
        self._patience = 2 * (clock() - self._begin)
        try:
            self.args["for"] = self._missing()
        except Exception as error:
            # The wait itself goes on.
            self.args["for"] = f"unknown ({type(error).__name__})"


@contextlib.contextmanager
def _recorded(
    deadline: Any, missing: Callable[[], str], label: Label, recorder: Recorder
) -> Iterator[_Wait]:
    """Record a wait in the block, unless it is over at the first look."""
    wait = _Wait(functools.partial(deadline.ask, missing))
    begin, before = clock(), deadline.waited
    try:
        yield wait
    finally:
        if deadline.waited > before:
            args = {"call": str(deadline.what), **wait.args}
            recorder.add(label, begin, clock(), args)


def waits(
    function: Function, label: Label, describe: Describe | None, recorder: Recorder
) -> Function:
    """Return a replacement of `Deadline.wait` that records waits."""

    @functools.wraps(function)
    def wait(
        self: Any,
        ready: Callable[[], Any],
        missing: Callable[[], str],
        **options: Any,
    ) -> Any:
        with _recorded(self, missing, label, recorder) as found:

            def look() -> Any:
                result = ready()
                if result is None:
                    found.ask()
                return result

            return function(self, look, missing, **options)

    return wait


def blocks(
    function: Function, label: Label, describe: Describe | None, recorder: Recorder
) -> Function:
    """Return a replacement of `Deadline.block` that records waits."""

    @functools.wraps(function)
    def block(
        self: Any,
        attempt: Callable[[float], Any],
        missing: Callable[[], str],
    ) -> Any:
        with _recorded(self, missing, label, recorder) as found:

            def attempt_and_ask(seconds: float) -> Any:
                result = attempt(min(seconds, found.patience))
                if result is None:
                    found.ask()
                return result

            return function(self, attempt_and_ask, missing)

    return block


# Marks


class Marked(NamedTuple):
    """A method that is marked with `traced`; see there."""

    # The class that defines it, and its name.
    owner: type
    method: str
    name: str
    describe: Describe | None
    wrap: Callable[[Function, Label, Describe | None, Recorder], Function]

    @property
    def label(self) -> Label:
        """The label of its spans."""
        return Label(self.name, f"{self.owner.__name__}.{self.method}")


MARKED: list[Marked] = []


class _Mark:
    """Stands for a marked method until its class is complete."""

    def __init__(self, function: Function, *how: Any) -> None:
        self._function, self._how = function, how

    def __set_name__(self, owner: type, method: str) -> None:
        setattr(owner, method, self._function)
        MARKED.append(Marked(owner, method, *self._how))


def traced(
    name: str, describe: Describe | None = None, wrap: Any = None
) -> Callable[[F], F]:
    """Mark a method whose calls are shown as spans.

    Args:
        name: Of the spans.
        describe: Called with the positional arguments and the result; returns what is
            shown with the span.
        wrap: `calls` by default; `steps` for the steps of an agent; `waits` or `blocks`
            for those of a `Deadline`.
    """

    def mark(function: F) -> F:
        return _Mark(function, name, describe, wrap or calls)  # type: ignore[return-value]

    return mark


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Record the calls of all marked methods during the block."""
    with contextlib.ExitStack() as undo:
        for mark in MARKED:
            original = vars(mark.owner)[mark.method]
            wrapper = mark.wrap(original, mark.label, mark.describe, recorder)
            undo.callback(setattr, mark.owner, mark.method, original)
            setattr(mark.owner, mark.method, wrapper)
        yield

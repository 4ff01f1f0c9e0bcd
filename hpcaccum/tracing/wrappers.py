"""Wrappers of methods that record a span for each call."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from hpcaccum.tracing.recorder import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from hpcaccum.deadline import Deadline
    from hpcaccum.tracing.recorder import Label, Recorder

    # From the positional arguments and the result to what is shown with the span.
    Describe = Callable[[tuple[Any, ...], Any], Mapping[str, Any]]
    Function = Callable[..., Any]

# Seconds of a wait after which it is asked what is missing, for the first time. The
# answer may be a round trip to another node.
_PATIENCE = 1e-3


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
    deadline: Deadline, missing: Callable[[], str], label: Label, recorder: Recorder
) -> Iterator[_Wait]:
    """Record a wait in the block, unless it is over at the first look."""
    wait, begin, before = _Wait(missing), clock(), deadline.waited
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
        self: Deadline,
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
        self: Deadline,
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

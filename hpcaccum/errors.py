"""The error types of the package, and the format of ranks and numbers in messages.

Each type is also the closest builtin type, so callers may catch that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

# The status of a program that ends because a rank is lost: start it again, from its
# newest checkpoint. Source: EX_TEMPFAIL of sysexits.h.
RESTART = 75

# Ends messages about gradients of optimizers that do not come.
NO_MORE_DATA = "call leave() when a rank has no more data"

# The attribute of an error that another rank raises, too.
_ECHO = "_hpcaccum_echo"


class InvalidArgumentError(ValueError):
    """Raised for an invalid argument, before anything is changed."""


class DisagreementError(ValueError):
    """Raised on every rank if arguments, or calls, differ between ranks."""


class WaitTimeoutError(TimeoutError):
    """Raised when a wait exceeds its timeout; the message names the missing ranks.

    Attributes:
        missing: What was waited for.
    """

    missing = ""


class EverybodyLeftError(WaitTimeoutError):
    """Raised by a take at once, if all ranks have left and there is no gradient."""


class FreedError(RuntimeError):
    """Raised by the use of an object after its ``free()``."""


class BrokenObjectError(RuntimeError):
    """Raised by the use of an object on a rank where an exception has ended a call.

    The rank has left an accumulator, and others go on without it; the cause is the
    first exception. Others cannot go on with a reducer, or with a server whose update
    an exception has ended.
    """


class LostRankError(RuntimeError):
    """Raised by a call that cannot complete because a rank is lost: its process died.

    A program that ends with it has the status `RESTART`.
    """


class CheckpointError(ValueError):
    """Raised for a file that is damaged, or is not a checkpoint.

    Also if another run has begun to save to the same directory.
    """


class MPIUnavailableError(ImportError):
    """Raised at the first use of MPI if no MPI library can be loaded."""


class DeviceUnavailableError(RuntimeError):
    """Raised if no CUDA device can be used; the message says what is missing."""


def echo(error: E) -> E:
    """Return an error, marked: another rank raises it, too, and should print it."""
    setattr(error, _ECHO, True)
    return error


def is_echo(error: BaseException | None) -> bool:
    """Whether an error was marked by `echo`."""
    return hasattr(error, _ECHO)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0, 2``, ``ranks 0-7, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    number = sum(run[-1] - run[0] + 1 for run in runs)
    return f"{plural(number, 'rank')} {names or 'none'}"


def plural(number: int, what: str) -> str:
    """Return the word for a number of things: ``rank`` for one, else ``ranks``."""
    return what if number == 1 else f"{what}s"


def counted(number: int, what: str) -> str:
    """Return a number of things as text: ``1 rank``, ``2 ranks``."""
    return f"{number} {plural(number, what)}"

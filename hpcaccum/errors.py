"""The error types, each also a builtin that a caller would guess; ranks in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class InvalidArgumentError(ValueError):
    """Raised for an argument that cannot be used, before anything is changed."""


class DisagreementError(ValueError):
    """Raised on every rank when ranks pass different arguments to one call."""


class WaitTimeoutError(TimeoutError):
    """Raised when a wait takes longer than its timeout; says who is missing."""


class EverybodyLeftError(WaitTimeoutError):
    """Raised at once by a take when all ranks have left and no gradient is there."""


class FreedError(RuntimeError):
    """Raised by any use of an object after its ``free()``."""


class MPIUnavailableError(ImportError):
    """Raised when MPI is needed and no MPI library can be loaded."""


class DeviceUnavailableError(RuntimeError):
    """Raised when a CUDA device is needed and cannot be used; says what is missing."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Name ranks as people do: ``rank 3``, ``ranks 0, 2``, ``ranks 0-7, 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if single else 's'} {names or 'none'}"

"""The error types; each is also a builtin that a caller would guess."""

from __future__ import annotations


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

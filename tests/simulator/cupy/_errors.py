"""The errors of the CUDA runtime, with its texts."""

from __future__ import annotations

_TEXTS = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA "
    "runtime version",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    712: "cudaErrorHostMemoryAlreadyRegistered: part or all of the requested memory "
    "range is already mapped",
    713: "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a "
    "registered memory region",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
}


class CUDARuntimeError(RuntimeError):
    """Raised when the CUDA runtime refuses; `_why` is what only a simulator knows."""

    def __init__(self, status, _why=""):
        self.status = status
        super().__init__(_TEXTS[status] + (f" ({_why})" if _why else ""))

"""NVRTC: its error."""

from __future__ import annotations

__all__ = ["NVRTCError"]


class NVRTCError(RuntimeError):
    """Raised when NVRTC refuses."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"NVRTC_ERROR ({status})")

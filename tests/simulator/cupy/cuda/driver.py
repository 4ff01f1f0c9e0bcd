"""The CUDA driver API: its error."""

from __future__ import annotations

from .._errors import CUDADriverError

__all__ = ["CUDADriverError"]

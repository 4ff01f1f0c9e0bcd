"""CUDA sources, compiled for the CPU and run there: for tests, never for speed."""

from __future__ import annotations

from .compiler import missing
from .errors import CudaError
from .module import Module, build

__all__ = ["CudaError", "Module", "build", "missing"]

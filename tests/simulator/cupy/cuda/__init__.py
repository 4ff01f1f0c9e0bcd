"""Devices, streams and memory of the simulated CuPy."""

from __future__ import annotations

from . import compiler, nccl, runtime
from .device import Device
from .memory import Memory, MemoryPointer
from .stream import Event, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device",
    "Event",
    "Memory",
    "MemoryPointer",
    "Stream",
    "compiler",
    "get_current_stream",
    "get_elapsed_time",
    "nccl",
    "runtime",
]

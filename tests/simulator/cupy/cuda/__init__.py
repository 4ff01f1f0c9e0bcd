"""Devices, streams and memory of the simulated CuPy."""

from __future__ import annotations

from . import (
    compiler,
    device,
    driver,
    memory,
    nccl,
    pinned_memory,
    runtime,
    stream,
)
from .device import Device, get_device_id
from .memory import BaseMemory, Memory, MemoryPointer, MemoryPool, UnownedMemory
from .pinned_memory import PinnedMemory, PinnedMemoryPointer, alloc_pinned_memory
from .stream import Event, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc_pinned_memory",
    "compiler",
    "device",
    "driver",
    "get_current_stream",
    "get_device_id",
    "get_elapsed_time",
    "memory",
    "nccl",
    "pinned_memory",
    "runtime",
    "stream",
]

"""The free memory of this machine or container."""

from __future__ import annotations

import contextlib
from pathlib import Path


def free_memory() -> float:
    """Return the number of free bytes; infinity if it is unknown."""
    free = float("inf")
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = float(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limits = Path("/sys/fs/cgroup")
        limit = float((limits / "memory.max").read_text())
        used = float((limits / "memory.current").read_text())
        words = (limits / "memory.stat").read_text().split()
        # The count includes inactive files, which the kernel evicts when necessary.
        used -= float(words[words.index("inactive_file") + 1])
        free = min(free, limit - used)
    return free

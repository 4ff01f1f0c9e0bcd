"""How much memory this machine, or container, can still give."""

from __future__ import annotations

import contextlib
from pathlib import Path


def free_memory() -> float:
    """Return bytes; infinity where the system does not say."""
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
        # Files that nobody uses are counted, but give way.
        used -= float(words[words.index("inactive_file") + 1])
        free = min(free, limit - used)
    return free

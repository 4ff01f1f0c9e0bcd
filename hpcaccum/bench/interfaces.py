"""The bytes that the network interfaces of this host have sent and received.

It needs no MPI.
"""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path
from typing import NamedTuple

CLASS_NET = Path("/sys/class/net")
# ARPHRD_LOOPBACK of the kernel.
_LOOPBACK = "772"


class Traffic(NamedTuple):
    """Bytes since the host started."""

    sent: int
    received: int


class Interfaces:
    """The interfaces of this host that lead to other hosts.

    Args:
        root: Where the kernel lists them.

    Attributes:
        names: All but loopback, and but those that pass their bytes on to others, such
            as a bridge: bytes would be counted twice.
    """

    def __init__(self, root: Path = CLASS_NET) -> None:
        found = sorted(root.iterdir()) if root.is_dir() else []
        self._paths = [path for path in found if _counts(path)]
        self.names = [path.name for path in self._paths]

    def read(self) -> Traffic:
        """Return the bytes of all interfaces together."""
        sent, received = (
            sum(_number(path / "statistics" / name) or 0 for path in self._paths)
            for name in ("tx_bytes", "rx_bytes")
        )
        return Traffic(sent, received)


def network() -> str:
    """Return a name of the interfaces that this process uses.

    Processes have the same name if and only if they share their interfaces: containers
    of one host may have interfaces of their own.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return platform.node()


def _counts(path: Path) -> bool:
    if any(path.glob("lower_*")) or _text(path / "type") == _LOOPBACK:
        return False
    counters = path / "statistics"
    return None not in (_number(counters / "tx_bytes"), _number(counters / "rx_bytes"))


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    # An interface may vanish at any time.
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""

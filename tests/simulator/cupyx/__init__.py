"""What CuPy keeps in cupyx: pinned arrays."""

from __future__ import annotations

from cupy import _transfer

__all__ = ["empty_pinned"]


def empty_pinned(shape, dtype=float, order="C"):
    """Return a NumPy array in pinned memory."""
    return _transfer.empty_pinned(shape, dtype, order)

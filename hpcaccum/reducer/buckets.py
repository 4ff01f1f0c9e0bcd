"""Buckets: the pieces of a flat buffer in which data travel, and which are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccum.layout import Layout


def cut(size: int, most: int) -> list[slice]:
    """Cut a buffer into buckets of at most ``most`` elements, from its end on.

    A backward pass computes the gradients of the last layers first.
    """
    return [slice(max(0, end - most), end) for end in range(size, 0, -most)]


class Readiness:
    """Counts how many buckets, from the first on, consist of ready arrays only.

    Args:
        layout: Of the arrays.
        buckets: In the order of work.
    """

    def __init__(self, layout: Layout, buckets: list[slice]) -> None:
        inside = [layout.overlaps(bucket) for bucket in buckets]
        self._touched: dict[str, list[int]] = {name: [] for name in layout}
        for number, arrays in enumerate(inside):
            for name, _, _ in arrays:
                self._touched[name].append(number)
        self._awaited = [len(arrays) for arrays in inside]
        self.reset()

    def reset(self) -> None:
        """Make no array ready."""
        self._missing, self._ready = self._awaited.copy(), 0

    def add(self, name: str) -> int:
        """Make one more array ready; return how many buckets are."""
        for bucket in self._touched[name]:
            self._missing[bucket] -= 1
        while self._ready < len(self._missing) and self._missing[self._ready] == 0:
            self._ready += 1
        return self._ready

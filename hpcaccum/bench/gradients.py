"""The gradients of the benchmarks: small numbers, whose sums are exact."""

from __future__ import annotations

import numpy as np

from hpcaccum.dtypes import Array

# A local step that is never stale, and a bound of the staleness that none reaches.
NEVER_STALE = ANY_STALENESS = 1 << 30


def gradient(rank: int, count: int) -> Array:
    """Return the gradient of a rank: ``count`` elements of float32."""
    elements: Array = np.arange(count, dtype=np.float32) % 64
    elements += rank
    return elements


def sum_of_gradients(ranks: int, count: int) -> Array:
    """Return the sum of the gradients of the first ``ranks`` ranks."""
    total = gradient(0, count)
    total *= ranks
    total += ranks * (ranks - 1) / 2
    return total

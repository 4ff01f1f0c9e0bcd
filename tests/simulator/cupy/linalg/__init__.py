"""Linear algebra: norms."""

from __future__ import annotations

import numpy as np

from .._compute import late


def norm(x, ord=None, axis=None, keepdims=False):
    return late(np.linalg.norm, x, ord=ord, axis=axis, keepdims=keepdims)

"""Sums of gradients that have some rows of a matrix only.

Time and memory grow with the rows that are given. Rows are added in the order in which
they are given, so the sums have the bits of `numpy.add.at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcaccum.dtypes import Array, quiet

# Elements that are added by one call of NumPy, which needs the position of each.
_CHUNK = 1 << 16


class Rows(NamedTuple):
    """Some rows of a matrix: ascending `indices` (int64), each once, and their values.

    A weight (float64) is the sum of the weights of the gradients that have the row:
    their number, if each weight is 1.
    """

    indices: Array
    weights: Array
    values: Array


def distinct(indices: Array, values: Array, dtype: np.dtype[Any]) -> Rows:
    """Return the rows of one gradient, which may repeat them in any order."""
    with quiet():
        if indices.size > 1 and not (indices[1:] > indices[:-1]).all():
            indices, values, _, _ = _add(indices, values, dtype)
        values = values.astype(dtype, copy=False)
    return Rows(indices, np.ones(indices.size), values)


def merged(parts: Sequence[Rows]) -> Rows:
    """Return the sum of gradients, added from the first to the last.

    The sum of a single one shares memory with it.
    """
    if len(parts) == 1:
        return parts[0]
    indices, weights, values = map(np.concatenate, zip(*parts, strict=True))
    with quiet():
        indices, values, order, begins = _add(indices, values, values.dtype)
    weights = np.add.reduceat(weights[order], begins) if weights.size else weights
    return Rows(indices, weights, values)


def weighted(rows: Rows, factor: float) -> Rows:
    """Return rows times the weight of their gradient; the same object if it is 1."""
    if factor == 1:
        return rows
    values = rows.values * rows.values.dtype.type(factor)
    return Rows(rows.indices, rows.weights * factor, values)


def _add(
    indices: Array, values: Array, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array, Array]:
    """Return different indices and the sums of their rows, and where these came from.

    That is the order in which the given indices ascend, and the positions in it at
    which another one begins.
    """
    # Stable, so that rows of one index are added in the order in which they are given.
    order = np.argsort(indices, kind="stable")
    ascending = indices[order]
    new = np.empty(indices.size, np.bool_)
    new[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    begins = np.flatnonzero(new)
    sums = values[order[begins]].astype(dtype, copy=False)
    if begins.size < indices.size:
        positions = np.cumsum(new)[~new] - 1
        add_at(sums, positions, values[order[~new]])
    return ascending[begins], sums, order, begins


def add_at(sums: Array, positions: Array, rows: Array) -> None:
    """Add rows to those of ``sums`` at ``positions``, which may repeat.

    Does what ``numpy.add.at(sums, positions, rows)`` does, several times as fast.
    """
    width = sums.shape[1]
    if not width:
        return
    flat, columns, step = sums.reshape(-1), np.arange(width), max(1, _CHUNK // width)
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        elements = positions[piece, None] * width + columns
        added = rows[piece].astype(sums.dtype, copy=False)
        np.add.at(flat, elements.reshape(-1), added.reshape(-1))
